"""See docs/tools.md, section `timeline`."""
