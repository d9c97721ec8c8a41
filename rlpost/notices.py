"""Warnings of a run's other processes, which no one would see: each writes its own to a file; the driver tells them.

Standard library only, as `heartbeat.py`, in whose folder the files lie.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".warnings.jsonl"
PACKAGE = "rlpost"  # the logger above all of ours


class NoticeWriter(logging.Handler):
    """Appends to `path` what this process's loggers of rlpost warn of, from `attach` to `close`. `name` is its own."""

    def __init__(self, path: Path, name: str):
        super().__init__(logging.WARNING)
        self._path, self._process = path, name

    def attach(self) -> None:
        """Begin."""
        logging.getLogger(PACKAGE).addHandler(self)

    def close(self) -> None:
        """End."""
        logging.getLogger(PACKAGE).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one warning; what cannot be written is lost, as without this."""
        line = json.dumps({"process": self._process, "message": record.getMessage()}) + "\n"
        with suppress(OSError), open(self._path, "a") as file:
            file.write(line)


class NoticeReader:
    """Tells what the processes of `folder` have written since the last time, the same words once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._told: set[str] = set()

    def tell(self) -> None:
        """Log what is new."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError), open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().splitlines(keepends=True)
                whole = [line for line in lines if line.endswith(b"\n")]
                self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, whole))
                for notice in map(json.loads, whole):
                    if notice["message"] not in self._told:
                        self._told.add(notice["message"])
                        logger.warning("%s: %s", notice["process"], notice["message"])
