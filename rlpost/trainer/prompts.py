"""Which prompt is issued next: the training stream, prompts that user code adds, and an order of its own making."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlpost.data import PromptStream
from rlpost.trajectory import Prompt

# candidates in their present order -> the same, in the order to issue them, as positions
Sampler = Callable[[Sequence[Prompt]], Sequence[int]]


class PromptQueue:
    """Prompts one by one: added ones first, then the stream, of which `sampler` orders `window` prompts at a time.

    Args:
        stream: the training data.
        sampler: None: the stream's own order.
        window: prompts that the sampler sees at once; it chooses again when they are used up.
    """

    def __init__(self, stream: PromptStream, sampler: Sampler | None = None, window: int = 1):
        self._stream, self._sampler, self._window_size = stream, sampler, window
        self._added: deque[Prompt] = deque()
        self._window: deque[Prompt] = deque()
        self._num_added = 0

    def add(self, prompt: Prompt) -> None:
        """Issue `prompt` before those that are left in the stream. It gets an id and an index of its own."""
        self._num_added += 1
        self._added.append(replace(prompt, id=f"added/{self._num_added}/{prompt.id}", index=-self._num_added))

    def pop(self) -> Prompt | None:
        """The next prompt; None when the stream has ended."""
        if not self._added:
            self._fill()
        queue = self._added or self._window
        return queue.popleft() if queue else None

    def peek(self, n: int) -> list[Prompt]:
        """The next `n` of the stream in its own order, which stay where they are."""
        cursor = self._stream.state_dict()
        prompts = self._stream.next(n)
        self._stream.load_state_dict(cursor)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Stream cursor and the prompts that were drawn from it and not issued yet."""
        return {
            "stream": self._stream.state_dict(),
            "added": list(self._added),
            "window": list(self._window),
            "num_added": self._num_added,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._stream.load_state_dict(state["stream"])
        self._added, self._window = deque(state["added"]), deque(state["window"])
        self._num_added = state["num_added"]

    def _fill(self) -> None:
        if self._window:
            return
        prompts = self._stream.next(self._window_size)
        if prompts:
            self._window.extend(prompts[i] for i in self._order(prompts))

    def _order(self, prompts: Sequence[Prompt]) -> list[int]:
        positions = list(range(len(prompts)))
        if self._sampler is None:
            return positions
        order = self._sampler(prompts)
        order = [] if order is None else list(order)
        if sorted(order) != positions:
            raise ValueError(
                f"trainer.sampler returned {order[:20]} for {len(prompts)} prompts: expected each of the positions "
                f"0..{len(prompts) - 1} once"
            )
        return order
