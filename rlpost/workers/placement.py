"""Which process sits on which device: one placement-group bundle a GPU, trainers and engines pinned to them."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpost.platform import Platform, cpu_count, platform

TRAINER_GPU_SHARE = 0.5  # what Ray counts for the trainer; engines take none and are pinned by bundle


@dataclass(slots=True)
class Placement:
    """Colocated placement of `num_ranks` trainer ranks and `num_ranks // tensor_parallel` engine replicas.

    On CPU there are no bundles: processes share the host.
    """

    num_ranks: int
    num_replicas: int
    tensor_parallel: int
    platform: Platform
    group: PlacementGroup | None = None
    device_ids: tuple[str, ...] = ()  # of each bundle, as its node names them

    @staticmethod
    def create(
        nnodes: int, gpus_per_node: int | None, tensor_parallel: int, num_replicas: int | None, timeout_s: float = 120.0
    ) -> "Placement":
        """Reserve the devices.

        Raises:
            ValueError: more GPUs asked for than Ray has, or a tensor-parallel size that does not divide them.
        """
        here = platform()
        per_node = gpus_per_node or max(1, here.device_count())
        num_ranks = nnodes * per_node
        if here.kind == "cpu":
            return Placement(num_ranks, num_replicas or 1, tensor_parallel, here)
        if num_ranks % tensor_parallel:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide the {num_ranks} GPUs "
                "(cluster.nnodes x cluster.n_gpus_per_node)"
            )
        if num_replicas is not None and num_replicas * tensor_parallel != num_ranks:
            raise ValueError(
                f"rollout.num_replicas={num_replicas} x rollout.tensor_model_parallel_size={tensor_parallel} make the "
                f"{num_ranks} GPUs when colocated"
            )
        available = int(ray.cluster_resources().get("GPU", 0))
        if available < num_ranks:
            raise ValueError(
                f"cluster.nnodes={nnodes} x cluster.n_gpus_per_node={per_node} asks for {num_ranks} GPUs, "
                f"Ray has {available}"
            )
        group = placement_group([{"GPU": 1, "CPU": 1}] * num_ranks, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except GetTimeoutError as error:
            remove_placement_group(group)
            raise RuntimeError(
                f"cluster.nnodes={nnodes} x cluster.n_gpus_per_node={per_node}: {num_ranks} GPUs with a CPU core each "
                f"did not become free within {timeout_s:g} s; Ray has {ray.available_resources()} left"
            ) from error
        ids = tuple(ray.get([_bundle_device.options(**_pin(group, i), num_gpus=1).remote() for i in range(num_ranks)]))
        return Placement(num_ranks, num_ranks // tensor_parallel, tensor_parallel, here, group, ids)

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options of trainer `rank`; it sees one device, as its device 0."""
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._threads())}}}
        env = self.platform.visibility_env([self.device_ids[rank]])
        if self.platform.kind == "rocm":
            env["HSA_ENABLE_IPC_MODE_LEGACY"] = "1"
        return _pin(self.group, rank) | {"num_gpus": TRAINER_GPU_SHARE, "runtime_env": {"env_vars": env}}

    def engine_options(self, replica: int, engine: str) -> dict[str, Any]:
        """Ray actor options of engine `replica`; it sees the devices of its tensor-parallel ranks."""
        env = self.platform.engine_env(engine)
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": env}}
        first = replica * self.tensor_parallel
        env |= self.platform.visibility_env(list(self.device_ids[first : first + self.tensor_parallel]))
        return _pin(self.group, first) | {"num_gpus": 0, "runtime_env": {"env_vars": env}}

    def service_options(self) -> dict[str, Any]:
        """Ray actor options of a service beside the engines, such as a reward model; it sees the first device."""
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._threads())}}}
        env = self.platform.visibility_env([self.device_ids[0]])
        return _pin(self.group, 0) | {"num_gpus": 0, "runtime_env": {"env_vars": env}}

    def remove(self) -> None:
        """Give the bundles back."""
        if self.group is not None:
            remove_placement_group(self.group)

    def _threads(self) -> int:
        return max(1, cpu_count() // self.num_ranks)


def _pin(group: PlacementGroup, bundle: int) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"scheduling_strategy": strategy, "num_cpus": 0}


@ray.remote
def _bundle_device() -> str:
    """The id of the GPU that Ray reserved for this bundle, as the node's visibility variable names it."""
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
