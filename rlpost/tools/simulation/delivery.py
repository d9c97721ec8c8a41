"""What if groups were not delivered in the order of issue: other buffers than the one that trains.

They answer what the order costs, and stand for systems that train on what is finished first.
"""

from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.buffer import GroupBuffer
from rlpost.trainer.limits import Limits
from rlpost.trajectory import Group


class OvertakingBuffer(GroupBuffer):
    """Delivers the first *finished* group in the order of issue.

    Args:
        limits: of the buffer.
        bounded: only where each group that is overtaken can still be trained within the staleness bound.
    """

    def __init__(self, limits: Limits, bounded: bool):
        super().__init__(limits)
        self._bounded = bounded

    def take(self) -> Group | None:
        """See `GroupBuffer.take`."""
        for position, slot in enumerate(self._slots):
            if slot.group is not None:
                self._remove(slot)
                self._delivered[self.step] += 1
                return slot.group
            if self._bounded and self._staleness(position + 1, slot.first_version) > self.limits.bound:
                return None
        return None


def make_buffer(scenario: Scenario) -> GroupBuffer:
    """`delivery` of the scenario: issued (as in training), bounded or finished (see `OvertakingBuffer`)."""
    if scenario.delivery == "issued":
        return GroupBuffer(scenario.limits)
    return OvertakingBuffer(scenario.limits, bounded=scenario.delivery == "bounded")
