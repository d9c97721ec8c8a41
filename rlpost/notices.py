"""Warnings of a run's other processes, which no one would see: each writes its own to a file; the driver tells them.

Standard library only, as `heartbeat.py`, in whose folder the files lie.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SUFFIX = ".warnings.jsonl"
_OURS = logging.getLogger("rlpost")  # above all of ours


class NoticeWriter(logging.Handler):
    """Appends to `path` what this process's loggers of rlpost warn of, from `attach` to `detach`.

    It goes to standard error as well, as without this: the file may be on a full disk, or nobody may read it.

    Args:
        path: of the file.
        name: of this process.
    """

    def __init__(self, path: Path, name: str):
        super().__init__(logging.WARNING)
        self._path, self._process = path, name

    def attach(self) -> None:
        """Begin."""
        _OURS.addHandler(self)

    def detach(self) -> None:
        """End. Not `close`, which a library that configures logging calls on every handler."""
        _OURS.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one warning, on a line of its own even after one that a full disk has cut."""
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)
        try:
            line = json.dumps({"process": self._process, "message": record.getMessage()})
            with open(self._path, "a") as file:
                file.write(f"\n{line}\n")
        except OSError:  # it was said on standard error
            return
        except Exception:  # what is wrong with a log call is for logging to say, not for the caller to suffer
            self.handleError(record)


class NoticeReader(logging.Handler):
    """Tells what the processes of `folder` have written since the last time; the same words once, the driver's too."""

    def __init__(self, folder: Path):
        super().__init__(logging.WARNING)
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._told: set[str] = set()

    def attach(self) -> None:
        """Take note of what this process says itself."""
        _OURS.addHandler(self)

    def detach(self) -> None:
        """No more."""
        _OURS.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See `attach`."""
        with suppress(Exception):  # a wrong log call; other handlers say so
            self._told.add(record.getMessage())

    def tell(self) -> None:
        """Log what is new. Files and lines that cannot be read are passed over."""
        with suppress(OSError):
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                for line in self._new_lines(path):
                    notice = _parsed(line)
                    if notice is not None and notice["message"] not in self._told:
                        self._told.add(notice["message"])
                        logger.warning("%s: %s", notice["process"], notice["message"])

    def _new_lines(self, path: Path) -> list[bytes]:
        """Whole ones; the rest of the last is waited for."""
        offset = self._offsets.get(path, 0)
        with open(path, "rb") as file:
            file.seek(offset)
            new = file.read()
        end = new.rfind(b"\n") + 1
        self._offsets[path] = offset + end
        return new[:end].splitlines()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A notice; None for a line that is empty or was cut."""
    with suppress(ValueError):
        notice = json.loads(line)
        if isinstance(notice, dict) and notice.keys() >= {"process", "message"}:
            return notice
    return None
