"""Tasks made by code, used as `task://rlpost.tasks.<module>.<function>?key=value`."""
