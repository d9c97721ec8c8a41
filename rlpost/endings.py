"""How a command can end: the exit statuses, and the exceptions that mean one of them. Tabled in docs/reliability.md."""

from collections.abc import Iterator
from contextlib import contextmanager

FINISHED = 0
FAILED = 1
CONFIG_ERROR = 2
STALLED = 70  # no progress within a limit of trainer.timeouts
RESUMABLE = 75  # ended from outside (SIGTERM); the same command goes on. EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C


class Stalled(Exception):
    """A process made no progress for longer than `trainer.timeouts` allows; the message names it and the report."""


class Preempted(Exception):
    """SIGTERM, and the step could not be ended in order; the message says why, and what a resume begins from."""


class Failed(Exception):
    """An error that is none of the configuration, as its cause, a `ValueError`, would be taken for."""


@contextmanager
def begun() -> Iterator[None]:
    """The run has begun: a `ValueError` inside, as of the user's functions, is raised as `Failed`, from itself."""
    try:
        yield
    except ValueError as error:
        raise Failed(described(error)) from error


def described(error: BaseException) -> str:
    """Type and message of an error."""
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
