"""How the ranks of the trainer are arranged: shards and replicas of the weights, slices of a sequence."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# (output, input, group): the equal parts of all ranks in one tensor; torch renamed it in 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True, frozen=True)
class Parallel:
    """Arrangement of W ranks.

    Attributes:
        mesh: weights are sharded over its last dimension and replicated over the first, if there are two.
        sequence_group: ranks that share a pack under Ulysses sequence parallelism; None when it is off.
        dp_rank, dp_size: which part of a batch this rank works on, and how many parts there are.
    """

    mesh: DeviceMesh
    sequence_group: dist.ProcessGroup | None
    dp_rank: int
    dp_size: int

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that together hold one copy of the weights."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def sequence_size(self) -> int:
        """Ranks that share one pack."""
        return 1 if self.sequence_group is None else dist.get_world_size(self.sequence_group)

    @property
    def leads_sequence(self) -> bool:
        """True on the one rank of a sequence group that reports (all compute the same)."""
        return self.sequence_group is None or dist.get_rank(self.sequence_group) == 0


def make_parallel(device_type: str, fsdp_size: int, sequence_size: int) -> Parallel:
    """Build meshes over all ranks of the default process group.

    Raises:
        ValueError: a size that does not divide the number of ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = world if fsdp_size == -1 else fsdp_size
    for key, size in (("fsdp.fsdp_size", shards), ("ulysses_sequence_parallel_size", sequence_size)):
        if world % size:
            raise ValueError(f"{key}={size} does not divide the {world} trainer ranks")
    if shards == world:
        mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device_type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    group = None
    if sequence_size > 1:
        sequence = init_device_mesh(
            device_type, (world // sequence_size, sequence_size), mesh_dim_names=("data", "sequence")
        )
        group = sequence.get_group("sequence")
    return Parallel(mesh, group, rank // sequence_size, world // sequence_size)
