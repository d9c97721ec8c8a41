"""Memory that a process holds at the same point of every step, where it should hold the same."""

PATIENCE = 5  # times in a row
LEAST_BYTES = 16 << 20  # each time; less may be an allocator's rounding
GIB = 2**30


class Growth:
    """Notices that what is held grows and never falls, long before it is all that there is. Says so once.

    Not in every step: weights are not synced and checkpoints not saved in each, and some leaks are small.
    """

    def __init__(self) -> None:
        self._step = 0
        self._grown: list[tuple[int, int]] = []  # since it last fell: steps and bytes where it was more than before
        self._told = False

    def look(self, held_bytes: int) -> str:
        """What is wrong, "" if nothing is or it was said before; `held_bytes` are those of this step."""
        self._step += 1
        last = self._grown[-1][1] if self._grown else 0
        if held_bytes <= last - LEAST_BYTES:
            self._grown = []
        if not self._grown or held_bytes >= last + LEAST_BYTES:
            self._grown.append((self._step, held_bytes))
        if self._told or len(self._grown) <= PATIENCE:
            return ""
        self._told = True
        (began, first), times = self._grown[0], len(self._grown) - 1
        return (
            f"device memory that is held before an update has grown {times} times in the last {self._step - began} "
            f"steps and never fallen, from {first / GIB:.2f} to {held_bytes / GIB:.2f} GiB: something is never freed, "
            "and the run will run out of memory; perf/memory_at_rest_gb goes on counting"
        )
