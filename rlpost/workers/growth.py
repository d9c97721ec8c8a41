"""Memory that a process holds at the same point of every step, where it should hold the same."""

PATIENCE = 5  # steps in a row
LEAST_BYTES = 16 << 20  # a step; less may be an allocator's rounding
GIB = 2**30


class Growth:
    """Notices that what is held grows, long before it is all that there is. Says so once."""

    def __init__(self) -> None:
        self._held: list[int] = []  # since it last did not grow, oldest first
        self._told = False

    def look(self, held_bytes: int) -> str:
        """What is wrong, "" if nothing is or it was said before; `held_bytes` are those of this step."""
        if self._held and held_bytes < self._held[-1] + LEAST_BYTES:
            self._held = []
        self._held.append(held_bytes)
        if self._told or len(self._held) <= PATIENCE:
            return ""
        self._told = True
        first, steps = self._held[0], len(self._held) - 1
        return (
            f"device memory that is held before an update has grown in each of the last {steps} steps, from "
            f"{first / GIB:.2f} to {held_bytes / GIB:.2f} GiB: something is never freed, and the run will run out of "
            "memory; perf/memory_at_rest_gb goes on counting"
        )
