"""Which way weights take, given where trainer ranks and engines sit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CPU = "cpu"  # uuid of a process's device where it has none


@dataclass(slots=True, frozen=True)
class Place:
    """Where a trainer rank or an engine holds its weights: `host.host_id()` and its devices' uuids."""

    host: str
    devices: tuple[str, ...]


def number_readers(engines: Mapping[int, Place]) -> dict[int, dict[str, int]]:
    """Which of the readers on each of its devices a replica is, from 0: replica -> uuid -> number."""
    seen: Counter[str] = Counter()
    numbers: dict[int, dict[str, int]] = {}
    for replica, place in engines.items():
        numbers[replica] = {uuid: seen[uuid] for uuid in place.devices}
        seen.update(place.devices)
    return numbers


def choose_transport(asked: str, trainers: Sequence[Place], engines: Mapping[int, Place], disjoint: bool) -> str:
    """ "shm", "ipc", "gloo" or "nccl".

    Args:
        asked: `rollout.weight_sync`; "auto" takes the first that works of ipc (every engine's device also holds a
            trainer rank), nccl (devices differ), and host memory: shared, or with `disjoint` copied through gloo.
        trainers: by rank.
        engines: by replica.
        disjoint: trainer and engines are meant to share nothing.

    Raises:
        ValueError: what was asked for cannot work here; says why.
    """
    if asked == "auto":
        order = ("ipc", "nccl", "gloo") if disjoint else ("ipc", "nccl", "shm", "gloo")
        return next(transport for transport in order if not _obstacle(transport, trainers, engines))
    if obstacle := _obstacle(asked, trainers, engines):
        raise ValueError(f"rollout.weight_sync={asked} cannot work here: {obstacle}. rollout.weight_sync=auto chooses")
    return asked


def _obstacle(transport: str, trainers: Sequence[Place], engines: Mapping[int, Place]) -> str:
    """Why a transport cannot work, "" if it can. "gloo" always can."""
    lent = {uuid for place in trainers for uuid in place.devices}
    used = [(replica, uuid) for replica, place in engines.items() for uuid in place.devices]
    if transport in ("ipc", "nccl") and CPU in {*lent, *(uuid for _, uuid in used)}:
        return "it moves weights between devices, and this is a CPU"
    if transport == "ipc":
        for replica, uuid in used:
            if uuid not in lent:
                return f"replica {replica}'s device {uuid} holds no trainer rank whose memory it could map"
    if transport == "nccl":
        members = Counter([*trainers[0].devices, *(uuid for _, uuid in used)])
        (uuid, count), *_ = members.most_common(1)
        if count > 1:
            return f"device {uuid} would hold {count} ranks of one group, which NCCL and RCCL refuse"
    if transport == "shm":
        for replica, place in engines.items():
            if place.host != trainers[0].host:
                return f"replica {replica} is not on the host (or in the container) of trainer rank 0"
    return ""
