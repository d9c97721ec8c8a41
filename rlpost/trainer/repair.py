"""What is done about an engine whose kernels break parity: find AITER's families at fault, and go on without them."""

from collections.abc import Awaitable, Callable

from rlpost import aiter
from rlpost.trainer.fault_search import Result, Verdict, find_faults
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.setup import with_families


class RepairError(RuntimeError):
    """AITER breaks parity and the run is to stop, or cannot go on; the message names families and keys."""


class AiterRepair:
    """Bisects AITER's kernel families by starting the engines anew with some of them off.

    Args:
        engines: what the engines run with now.
        restart: starts all of them anew; their weights are the checkpoint's then.
        note: tells the person who watches.
    """

    def __init__(
        self,
        engines: Callable[[], RolloutConfig],
        restart: Callable[[RolloutConfig], Awaitable[None]],
        note: Callable[[str], None],
    ):
        self._engines, self._restart, self._note = engines, restart, note
        self._restarts = 0

    async def __call__(self, agrees: Callable[[], Awaitable[bool]]) -> bool:
        """Whether trainer and engines agree now, by `agrees`, which publishes and measures.

        False when no family was on, or when turning all off did not help: then AITER is not the cause.

        Raises:
            RepairError: families are at fault and `rollout.aiter_on_fault=stop`, or no restarts are left.
        """
        cfg = self._engines()
        families = cfg.aiter_kernels.set_to("on")
        if not families:
            return False
        left = cfg.aiter_max_restarts - self._restarts
        if left < 2:
            raise RepairError(
                f"AITER may be the cause, but rollout.aiter_max_restarts={cfg.aiter_max_restarts} engine restarts are "
                "spent: raise it, or set rollout.aiter=off"
            )
        self._note(f"AITER may be the cause: looking for the kernels at fault, with at most {left} engine restarts")

        async def works(parts: frozenset[str]) -> bool:
            await self._start(cfg, parts)
            return await agrees()

        result = await find_faults(
            [unit & families for unit in aiter.units(cfg.name) if unit & families],
            works,
            budget=left - 1,  # one more may be needed, to end with what is kept
            close=lambda parts: aiter.closure(cfg.name, parts),
        )
        if result.verdict is Verdict.NOT_OURS:
            self._note("AITER is not the cause: the difference stays with all of it off")
            return False
        if cfg.aiter_on_fault == "stop":
            raise RepairError(f"{describe(result)}. Set {keys(result)}, or rollout.aiter_on_fault=disable to go on so")
        if self._engines().aiter_kernels.set_to("on") != result.keep and not await works(result.keep):
            raise RepairError(f"{describe(result)}, yet parity still fails: set rollout.aiter=off")
        self._note(f"{describe(result)}, and stays off in this run. Set {keys(result)} to start so next time")
        return True

    async def _start(self, cfg: RolloutConfig, families: frozenset[str]) -> None:
        self._restarts += 1
        await self._restart(with_families(cfg, families))


def describe(result: Result) -> str:
    """Which families break parity, as far as was found."""
    faulty = ", ".join(sorted(result.faulty))
    if result.verdict is Verdict.GAVE_UP:
        return f"AITER breaks parity; rollout.aiter_max_restarts ended the search at {faulty}, which holds the fault"
    return f"AITER's {faulty} breaks parity"


def keys(result: Result) -> str:
    """The settings that turn the families at fault off."""
    if not result.keep:
        return "rollout.aiter=off"
    return " ".join(f"rollout.aiter_kernels.{family}=off" for family in sorted(result.faulty))
