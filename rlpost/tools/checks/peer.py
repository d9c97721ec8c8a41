"""Another process that answers questions. Imports nothing heavy, since every such process imports it anew."""

import multiprocessing as mp
import queue
from collections.abc import Callable
from typing import Any

SPAWN_S = 60.0  # for a process to start, import torch and answer


class Peer:
    """Another process that answers through a queue; a context manager that ends it.

    Args:
        target: called there as `target(requests, answers, *args)`.
    """

    def __init__(self, target: Callable[..., None], *args: Any):
        spawn = mp.get_context("spawn")
        self._requests, self._answers = spawn.Queue(), spawn.Queue()
        self._process = spawn.Process(target=_serve, args=(target, self._requests, self._answers, *args), daemon=True)

    def start(self) -> None:
        """Start the process."""
        self._process.start()

    def ask(self, question: Any) -> Any:
        """Put a question and wait for the answer."""
        self.post(question)
        return self.answer()

    def post(self, question: Any) -> None:
        """Put a question; `answer` gives what came of it."""
        self._requests.put(question)

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the other process failed (its error), is gone, or does not answer within `SPAWN_S`.
        """
        for _ in range(int(SPAWN_S / 0.2)):
            try:
                answer = self._answers.get(timeout=0.2)
            except queue.Empty:
                if self._process.exitcode is not None and self._answers.empty():
                    raise RuntimeError(f"a child process ended with status {self._process.exitcode}") from None
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise RuntimeError(f"a child process did not answer within {SPAWN_S:g} s")

    def stop(self) -> None:
        """End the process if it still runs."""
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> "Peer":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _serve(target: Callable[..., None], requests: Any, answers: Any, *args: Any) -> None:
    try:
        target(requests, answers, *args)
    except Exception as error:  # the process edge: whoever asked must hear of it, and not every error can be pickled
        answers.put(RuntimeError(f"{type(error).__name__}: {error}"))
