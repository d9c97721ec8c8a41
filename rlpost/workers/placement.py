"""Which process sits on which device: one placement-group bundle a GPU, trainers and engines pinned to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpost.host import cpu_count, exported
from rlpost.platform import Platform, platform
from rlpost.rocm import check_architectures

TRAINER_GPU_SHARE = 0.5  # what Ray counts for the trainer; engines take none and are pinned by bundle


@dataclass(slots=True, frozen=True)
class Pools:
    """How many devices train and how many roll out; `shared` if they are the same. `asked` names keys and values."""

    train: int
    rollout: int
    shared: bool
    asked: str

    @property
    def total(self) -> int:
        """Devices of the run."""
        return self.train if self.shared else self.train + self.rollout

    @staticmethod
    def colocated(nnodes: int, per_node: int) -> "Pools":
        """All devices do both."""
        asked = f"cluster.nnodes={nnodes} x cluster.n_gpus_per_node={per_node}"
        return Pools(nnodes * per_node, nnodes * per_node, True, asked)

    @staticmethod
    def disjoint(nnodes: int, per_node: int, train: int | None, rollout: int | None, limited: bool) -> "Pools":
        """Devices of their own. What is None is the rest; if both are, half each.

        Args:
            limited: whether nnodes x per_node is all there is (not on CPU).

        Raises:
            ValueError: the pools exceed the cluster, or one of them is empty.
        """
        total = nnodes * per_node
        if not limited:
            train, rollout = train or total, rollout or 1
        elif train is None:
            rollout = total // 2 if rollout is None else rollout
            train = total - rollout
        elif rollout is None:
            rollout = total - train
        asked = f"trainer.train_gpus={train} + trainer.rollout_gpus={rollout}"
        if limited and (train + rollout > total or train < 1 or rollout < 1):
            raise ValueError(
                f"{asked}: the pools need at least one GPU each and must not overlap, but cluster.nnodes={nnodes} x "
                f"cluster.n_gpus_per_node={per_node} has {total}. Ask for fewer, or set trainer.share_gpus=true to let "
                "both use the same GPUs"
            )
        return Pools(train, rollout, False, asked)

    def check_engines(self, tensor_parallel: int, num_replicas: int | None) -> None:
        """Hold the engines against the GPUs of rollout; not on CPU, where processes share the host.

        Raises:
            ValueError: a tensor-parallel size that does not divide them, or replicas that do not fill them evenly.
        """
        if self.rollout % tensor_parallel:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide the {self.rollout} GPUs "
                f"of rollout ({self.asked})"
            )
        if num_replicas is not None and num_replicas * tensor_parallel % self.rollout:
            raise ValueError(
                f"rollout.num_replicas={num_replicas} x rollout.tensor_model_parallel_size={tensor_parallel} must "
                f"make the {self.rollout} GPUs of rollout ({self.asked}), or a multiple: so many engines share each GPU"
            )


@dataclass(slots=True)
class Placement:
    """Where `num_ranks` trainer ranks and `num_replicas` engine replicas sit.

    Trainer rank i has bundle i. The engines' bundles begin at `first_engine_bundle`: 0 where both share the devices,
    `num_ranks` where each has its own. With more replicas than these hold, several share the same ones in turn. On CPU
    there are no bundles: processes share the host.
    """

    num_ranks: int
    num_replicas: int
    tensor_parallel: int
    platform: Platform
    first_engine_bundle: int = 0
    num_engine_bundles: int | None = None  # None: one for each rank of each replica
    group: PlacementGroup | None = None
    device_ids: tuple[str, ...] = ()  # of each bundle, as its node names them
    nodes: tuple[str, ...] = ()  # of each bundle
    memory_bytes: int = 0  # of the smallest device; 0 on CPU
    process_env: dict[str, str] = field(default_factory=dict)  # what the platform wants in every process

    @staticmethod
    def create(pools: "Pools", tensor_parallel: int, num_replicas: int | None, timeout_s: float = 120.0) -> "Placement":
        """Reserve the devices.

        Raises:
            ValueError: more GPUs asked for than Ray has, of a kind that is not supported, or a tensor-parallel size
                that does not divide those of rollout.
        """
        here = platform()
        if here.kind == "cpu":
            replicas = num_replicas or (1 if pools.shared else pools.rollout)
            return Placement(pools.train, replicas, tensor_parallel, here, 0 if pools.shared else pools.train)
        pools.check_engines(tensor_parallel, num_replicas)
        available = int(ray.cluster_resources().get("GPU", 0))
        if available < pools.total:
            raise ValueError(f"{pools.asked} asks for {pools.total} GPUs, Ray has {available}")
        group = placement_group([{"GPU": 1, "CPU": 1}] * pools.total, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except GetTimeoutError as error:
            remove_placement_group(group)
            left = ray.available_resources()
            raise RuntimeError(
                f"{pools.asked}: {pools.total} GPUs with a CPU core each did not become "
                f"free within {timeout_s:g} s; Ray has {left.get('GPU', 0):g} GPUs and "
                f"{left.get('CPU', 0):g} CPU cores free"
            ) from error
        bundles = ray.get([_look.options(**_pin(group, i), num_gpus=1).remote() for i in range(pools.total)])
        placement = Placement(
            pools.train,
            num_replicas or pools.rollout // tensor_parallel,
            tensor_parallel,
            here,
            0 if pools.shared else pools.train,
            pools.rollout,
            group,
            device_ids=tuple(bundle.device_id for bundle in bundles),
            nodes=tuple(bundle.node for bundle in bundles),
            memory_bytes=min(bundle.memory_bytes for bundle in bundles),
            process_env=here.process_env(exported()),
        )
        try:
            if here.kind == "rocm":
                check_architectures({f"{b.device_id} of node {b.node}": b.arch for b in bundles})
            placement.check_nodes()
        except ValueError:
            placement.remove()
            raise
        return placement

    def check_nodes(self) -> None:
        """An engine's processes see each other's devices, so they share a node.

        Raises:
            ValueError: an engine whose tensor-parallel ranks lie on more than one.
        """
        for replica in range(self.num_replicas):
            bundles = self._bundles(replica)
            if len(set(self.nodes[bundles])) > 1:
                raise ValueError(
                    f"rollout.tensor_model_parallel_size={self.tensor_parallel}: engine {replica} would lie on the "
                    f"nodes {', '.join(sorted(set(self.nodes[bundles])))}; choose a size that divides "
                    "cluster.n_gpus_per_node"
                )

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options of trainer `rank`; it sees one device, as its device 0."""
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._threads())}}}
        return _pin(self.group, rank) | {
            "num_gpus": TRAINER_GPU_SHARE,
            "runtime_env": {"env_vars": self.trainer_env(rank)},
        }

    def trainer_env(self, rank: int) -> dict[str, str]:
        """Environment of trainer `rank`."""
        return self.process_env | self.platform.visibility_env([self.device_ids[rank]])

    def engine_options(self, replica: int, env: Mapping[str, str]) -> dict[str, Any]:
        """Ray actor options of engine `replica`; `env` is what it needs besides its devices."""
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": dict(env)}}
        runtime_env = {"env_vars": self.engine_env(replica, env)}
        return _pin(self.group, self._bundles(replica).start) | {"num_gpus": 0, "runtime_env": runtime_env}

    def engine_env(self, replica: int, env: Mapping[str, str]) -> dict[str, str]:
        """`env` and the devices of the tensor-parallel ranks of engine `replica`."""
        devices = self.platform.visibility_env(self.device_ids[self._bundles(replica)])
        return self.process_env | dict(env) | devices

    def service_options(self) -> dict[str, Any]:
        """Ray actor options of a service beside the engines, such as a reward model; it sees the first device."""
        if self.group is None:
            return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._threads())}}}
        return _pin(self.group, 0) | {"num_gpus": 0, "runtime_env": {"env_vars": self.trainer_env(0)}}

    def remove(self) -> None:
        """Give the bundles back."""
        if self.group is not None:
            remove_placement_group(self.group)

    @property
    def shares_no_device(self) -> bool:
        """Whether no device holds both a trainer rank and an engine."""
        return self.platform.kind == "cpu" or self.first_engine_bundle > 0

    @property
    def replicas_apart(self) -> int:
        """Replicas that share no device: those with consecutive numbers, so many of them."""
        if self.num_engine_bundles is None:
            return self.num_replicas
        return self.num_engine_bundles // self.tensor_parallel

    @property
    def replicas_per_device(self) -> int:
        """Replicas that share each device."""
        return self.num_replicas // self.replicas_apart

    def _bundles(self, replica: int) -> slice:
        start = self.first_engine_bundle + replica % self.replicas_apart * self.tensor_parallel
        return slice(start, start + self.tensor_parallel)

    def _threads(self) -> int:
        """Of a trainer rank. Engines that run at the same time need cores too: a thread that waits for one holds up all
        others of its rank."""
        cores = cpu_count() - (self.num_replicas if self.first_engine_bundle else 0)
        return max(1, cores // self.num_ranks)


def _pin(group: PlacementGroup, bundle: int) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"scheduling_strategy": strategy, "num_cpus": 0}


@dataclass(slots=True, frozen=True)
class _Bundle:
    """The GPU that Ray reserved for a bundle; `device_id` as the node's visibility variable names it."""

    node: str
    device_id: str
    arch: str
    memory_bytes: int


@ray.remote
def _look() -> _Bundle:
    """What is in a bundle. The GPUs of one node are taken to be alike."""
    context, here = ray.get_runtime_context(), platform()
    return _Bundle(context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0]), here.arch, here.memory_bytes())
