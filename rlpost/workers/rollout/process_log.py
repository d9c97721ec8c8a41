"""Why did the engine's process die? Its last words are on stderr, so keep them."""

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_CAUSE = re.compile(r"\b\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b: .+")
_PREFIX = re.compile(r"^\(\w+(?: pid=\d+)?\)\s*(?:\w+ [\d-]+ [\d:]+ \[[^\]]*\]\s?)?")


class ProcessLog:
    """Passes on what child processes write, and remembers the last lines."""

    def __init__(self, num_lines: int = 400):
        self._lines: deque[str] = deque(maxlen=num_lines)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Children started inside inherit a pipe as stdout and stderr, for as long as they live."""
        sys.stdout.flush()
        sys.stderr.flush()
        read, write = os.pipe()
        saved = [os.dup(1), os.dup(2)]
        threading.Thread(target=self._pump, args=(read, os.dup(2)), daemon=True, name="engine-log").start()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in enumerate(saved, start=1):
                os.dup2(original, number)
                os.close(original)

    def _pump(self, read: int, out: int) -> None:
        with os.fdopen(read, "r", errors="replace") as stream, os.fdopen(out, "w") as sink:
            for line in stream:
                self._lines.append(line.rstrip())
                sink.write(line)
                sink.flush()

    def cause(self) -> str:
        """The first error of the last traceback that was written, and the lines before the end; "" if none."""
        lines = [_PREFIX.sub("", line) for line in self._lines]
        errors = [match.group(0) for line in lines if (match := _CAUSE.search(line))]
        return errors[0] if errors else "\n".join(lines[-20:])
