"""See docs/simulate.md."""
