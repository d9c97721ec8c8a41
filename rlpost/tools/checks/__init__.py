"""See docs/tools.md."""
