"""What one call of a reward may use, and the kinds of failure that come of it."""

import resource
from dataclasses import dataclass
from enum import StrEnum

MIB = 1024 * 1024


class ErrorKind(StrEnum):
    """Why a score is missing; the last part of the metric `reward/errors/<kind>`."""

    TIMEOUT = "timeout"  # the call took too long
    CRASH = "crash"  # its process died
    MEMORY = "memory"  # it asked for more than `reward.memory_limit_mb`
    OUTPUT = "output"  # it printed or returned more than `reward.max_output_mb`
    EXCEPTION = "exception"  # it raised
    NOT_FINITE = "not_finite"  # it returned NaN or an infinity
    WRONG_TYPE = "wrong_type"  # it returned something else than a number for each answer
    SANDBOX = "sandbox"  # the sandbox of code rewards did not start
    EMPTY = "empty"  # the trajectory has ended without a sampled token
    GROUP = "group"  # scored, but another answer of its group was not (`reward.on_error=drop_group`)


class Sandbox(StrEnum):
    """How the model's code is shut in: `reward.sandbox`."""

    FULL = "full"  # no network, no files but a folder of its own, no other processes; time, memory and output limits
    LIMITS = "limits"  # only the limits


@dataclass(slots=True, frozen=True, kw_only=True)
class CallLimits:
    """What the config allows one call of a reward term; given to a function with a parameter `call_limits`.

    Attributes:
        timeout_s: after it the call is an error.
        memory_bytes: what the call may allocate beyond what its process holds once everything is imported.
        max_output_bytes: of text printed, and of the pickled result.
    """

    timeout_s: float
    memory_bytes: int | None = None
    max_output_bytes: int = 16 * MIB
    sandbox: Sandbox = Sandbox.FULL


def limit_growth(num_bytes: int) -> None:
    """Let this process allocate at most `num_bytes` more than now; beyond that allocations fail.

    The limit is on writable private memory: shared libraries, of which torch alone maps gigabytes, do not count.
    """
    with open("/proc/self/status") as status:
        (held,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = held + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
