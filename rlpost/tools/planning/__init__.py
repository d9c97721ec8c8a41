"""See docs/tools.md, section `plan`."""
