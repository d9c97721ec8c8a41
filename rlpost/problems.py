"""How a config refuses a value: at once, or where all of it is checked, together with everything else it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_found: ContextVar[list[str] | None] = ContextVar("found", default=None)


def refuse(message: str) -> None:
    """Say what is wrong, by key and value, and the fix.

    Raises:
        ValueError: with `message`, except within `collecting`: that notes it, and the check goes on to the next.
    """
    found = _found.get()
    if found is None:
        raise ValueError(message)
    found.append(message)


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Gather what is refused, instead of stopping at the first."""
    found: list[str] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)
