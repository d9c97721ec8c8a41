"""Configs that note which of their fields are read."""

from dataclasses import fields, is_dataclass
from typing import Any


def watch(node: Any, prefix: str = "") -> set[str]:
    """Have `node` and the sections in it note every read of a field; the set that fills, of dotted keys."""
    seen: set[str] = set()
    _watch(node, prefix, seen)
    return seen


def _watch(node: Any, prefix: str, seen: set[str]) -> None:
    names = {field.name for field in fields(node)}
    for name in names:
        if is_dataclass(child := getattr(node, name)):
            _watch(child, f"{prefix}{name}.", seen)
    cls = type(node)

    def note(self: Any, name: str) -> Any:
        if name in names:
            seen.add(f"{prefix}{name}")
        return cls.__getattribute__(self, name)

    node.__class__ = type(cls.__name__, (cls,), {"__slots__": (), "__getattribute__": note})
