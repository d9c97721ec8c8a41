"""Peak memory of one device in each phase of a step, by component; and of one host. Pure arithmetic over a `Run`."""

from dataclasses import dataclass, field

from rlpost.tools.planning.activations import backward_bytes, kept_bytes, layer_bytes, passing_bytes
from rlpost.tools.planning.run import Run
from rlpost.workers.config import TrainRoleConfig

FLOAT = 4
TIGHT = 0.95  # of a device: beyond it, what the model does not see may not fit
SAMPLER_COPIES = 3  # of an engine's float32 logits
GATHERED_LAYERS = 3  # of FSDP: the one that computes, the next one, and its flat copy

Parts = dict[str, float]  # component -> bytes


@dataclass(slots=True, kw_only=True)
class Phase:
    """The peak of one phase on one device.

    Attributes:
        name: train, logprob, sync or generate.
        devices: all, train or rollout: those that this is about.
        parts: component -> bytes.
        capacity_bytes: of the device.
        problem: why it cannot work whatever the sum is; "" if it can.
    """

    name: str
    devices: str
    parts: Parts
    capacity_bytes: float
    problem: str = ""

    @property
    def total_bytes(self) -> float:
        """Sum of the components."""
        return sum(self.parts.values())

    @property
    def trainer_bytes(self) -> float:
        """Of it, what the trainer's allocator holds: to be held against `perf/max_memory_reserved_gb`."""
        own = [size for name, size in self.parts.items() if not name.startswith("engine: ") and name != "contexts"]
        return 0.0 if self.devices == "rollout" else sum(own)

    @property
    def share(self) -> float:
        """Of the device."""
        return self.total_bytes / self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not self.problem and self.share <= 1.0

    @property
    def verdict(self) -> str:
        """fits, tight or does not fit."""
        return ("tight" if self.share > TIGHT else "fits") if self.fits else "does not fit"


@dataclass(slots=True, kw_only=True)
class Engine:
    """One tensor-parallel rank of an engine, awake.

    Attributes:
        num_per_device: engines that share a device, and `rollout.gpu_memory_utilization`; all else is of one.
        weights, workspace, graphs, cache: bytes.
        cache_token_bytes: keys and values of one token.
        tokens: that the cache holds, over the whole engine.
        slots: sequences of mean length that run at once.
    """

    weights: float
    workspace: float
    graphs: float
    cache: float
    cache_token_bytes: float
    tokens: float
    slots: int
    num_per_device: int = 1
    problem: str = ""

    @property
    def parts(self) -> Parts:
        """Components by name, of all engines on a device."""
        each = {
            "engine: weights": self.weights,
            "engine: KV cache": self.cache,
            "engine: workspace": self.workspace,
            "engine: graphs": self.graphs,
        }
        return {name: self.num_per_device * size for name, size in each.items()}


@dataclass(slots=True, kw_only=True)
class Memory:
    """Phases of a run, and one host's memory by component."""

    phases: list[Phase]
    host: Parts = field(default_factory=dict)
    engine: Engine

    @property
    def fits(self) -> bool:
        """Whether all phases do."""
        return all(phase.fits for phase in self.phases)


def predict_memory(run: Run) -> Memory:
    """All phases. Where engines and trainer share devices, each is there in the other one's phases as well."""
    engine = engine_memory(run)
    contexts = [run.efficiency.context_bytes * processes for processes in (1, run.engines_per_device)]
    if run.pools.shared:
        contexts = [sum(contexts)] * 2
        resting = {"engine: graphs": engine.parts["engine: graphs"]} if run.takes_turns else engine.parts
        waiting = _resting_trainer(run)
        where, beside = ("all", "all"), resting
    else:
        waiting, where, beside = {}, ("train", "rollout"), {}
    of_trainer, of_engines = ({"contexts": size} for size in contexts)
    bucket = {"sync buckets": 2.0 * _bucket_bytes(run)}
    syncing = beside | ({"engine: weights": engine.parts["engine: weights"]} if run.takes_turns else {})
    phases = [
        ("train", where[0], _training(run) | beside | of_trainer, ""),
        ("logprob", where[0], _inferring(run) | beside | of_trainer, ""),
        ("sync", where[0], _publishing(run) | bucket | syncing | of_trainer, ""),
        ("generate", where[1], engine.parts | waiting | of_engines, engine.problem),
    ]
    if not run.pools.shared:
        phases.insert(3, ("sync", where[1], engine.parts | bucket | of_engines, engine.problem))
    if not run.inferred:
        phases = [phase for phase in phases if phase[0] != "logprob"]
    capacity = run.device.memory_bytes
    return Memory(
        phases=[
            Phase(name=name, devices=devices, parts=_present(parts), capacity_bytes=capacity, problem=problem)
            for name, devices, parts, problem in phases
        ],
        host=host_memory(run, engine),
        engine=engine,
    )


# --- trainer ---


def _roles(run: Run) -> dict[str, TrainRoleConfig]:
    roles: dict[str, TrainRoleConfig] = {"actor": run.cfg.actor}
    return roles | ({"critic": run.cfg.critic} if run.cfg.algo.needs_critic else {})


def trained_parameters(run: Run, role: str) -> int:
    """Parameters of a role that have gradients and optimizer state."""
    return run.adapter_parameters if role == "actor" and run.cfg.model.lora_rank else run.shape.parameters


def _kept_state(run: Run, *, params: bool, optimizer: bool) -> Parts:
    """Weights and optimizer state of all roles on one rank; without those that the flags say have left."""
    parts: Parts = {}
    for role, cfg in _roles(run).items():
        weights = (run.shape.parameters + (run.adapter_parameters if role == "actor" else 0)) * FLOAT
        if params or not cfg.fsdp.param_offload:
            parts[f"{role}: master weights"] = weights / run.shards
        if optimizer or not cfg.fsdp.optimizer_offload:
            parts[f"{role}: optimizer"] = 2 * FLOAT * trained_parameters(run, role) / run.shards
    return parts


def _reference(run: Run, *, awake: bool = False) -> Parts:
    own = run.cfg.algo.needs_reference and (run.cfg.model.lora_rank == 0 or run.cfg.ref.path is not None)
    if not own or (run.cfg.ref.param_offload and not awake):
        return {}
    return {"ref: weights": run.shape.parameters * run.train_width / run.shards}


def _gathered(run: Run) -> float:
    """Weights in the compute dtype that FSDP holds in full during a pass."""
    shape, setting = run.shape, run.cfg.actor.fsdp.reshard_after_forward
    reshards = run.shards > 1 if setting is None else setting
    layers = min(GATHERED_LAYERS, shape.layers) if reshards else shape.layers
    return run.train_width * (shape.root_parameters + layers * _mean_layer(run))


def _mean_layer(run: Run) -> float:
    shape = run.shape
    return (shape.parameters - shape.root_parameters - shape.other_parameters) / shape.layers


def _chunk(run: Run, tokens: float) -> tuple[float, float]:
    """Bytes of the head's float32 logits at a time, and how much of such a chunk the one before still holds."""
    logits = tokens * run.shape.vocab * FLOAT
    return min(run.efficiency.chunk_bytes, logits), float(logits > run.efficiency.chunk_bytes)


def _head_forward(run: Run, tokens: float) -> float:
    """Logits beside their exponentials, or beside the chunk before; compiled code writes no exponentials."""
    chunk, earlier = _chunk(run, tokens)
    return chunk * (1 + max(earlier, 0.0 if run.compiled else 1.0))


def _head_backward(run: Run, tokens: float, embedding: float) -> float:
    """The worst moment of the head's backward pass; `embedding`: bytes of the weight's gradient in the compute dtype,
    which is summed up in float32.

    Those moments: a chunk's logits appear while those before and their gradient are there; they turn into a gradient
    (without compilation, if the entropy has one too, through one more copy); and into the weight's gradient, a product
    as large as the sum.
    """
    chunk, earlier = _chunk(run, tokens)
    half, summed = run.train_width / FLOAT, FLOAT / run.train_width * embedding
    copies = 1.0 if run.cfg.algo.entropy_coeff and not run.compiled else 0.0
    appears = chunk * (1 + earlier * (1 + half)) + summed
    turns = chunk * (1 + copies + half + earlier * half) + summed
    adds = chunk * (1 + half) + 2 * summed
    states = tokens * run.train_width * run.shape.hidden  # their gradient
    return states + max(appears, turns, adds)


def _training(run: Run) -> Parts:
    """The role and the moment that need most, beside what all roles keep."""
    worst = max((_moment(run, role, cfg) for role, cfg in _roles(run).items()), key=lambda parts: sum(parts.values()))
    return _kept_state(run, params=True, optimizer=True) | _reference(run) | worst


def _moment(run: Run, role: str, cfg: TrainRoleConfig) -> Parts:
    """The worst of three moments of an update: the head's backward pass, that of the last layer, the end."""
    shape, width, factor = run.shape, run.train_width, run.efficiency.allocator
    tokens, num_micro = run.micro_batch(cfg)
    checkpointing = run.cfg.model.enable_gradient_checkpointing
    share = run.efficiency.compiled_kept if run.compiled else 1.0
    kept = tokens * kept_bytes(shape, width, run.kernel, checkpointing=checkpointing, wanted=run.wanted, share=share)
    anew = tokens * share * layer_bytes(shape, width, run.kernel) if checkpointing else 0.0
    trained = trained_parameters(run, role)
    gradients = FLOAT * trained / run.shards
    full = trained == shape.parameters
    embedding = width * shape.vocab * shape.hidden if full else 0.0
    reduced = (width + 2 * FLOAT) * _mean_layer(run) if full else 0.0  # a layer's gradients on their way to all ranks
    head = 0.0 if role == "critic" else max(_head_forward(run, tokens), _head_backward(run, tokens, embedding))
    before = gradients if num_micro > 1 else 0.0
    moments = [
        {"activations": factor * kept, "logits": factor * head, "gradients": before},
        {
            "activations": factor * (kept + anew),
            "working memory": factor * (tokens * backward_bytes(shape, width) + embedding + reduced),
            "gradients": before,
        },
        {"working memory": factor * ((width + FLOAT) * shape.root_parameters if full else 0.0), "gradients": gradients},
    ]
    return max(moments, key=lambda parts: sum(parts.values())) | {"gathered weights": _gathered(run)}


def _inferring(run: Run) -> Parts:
    """Old logprobs, reference logprobs or values: one layer at a time, and a chunk of logits."""
    shape, width, factor = run.shape, run.train_width, run.efficiency.allocator
    tokens = max(run.micro_batch(cfg)[0] for cfg in _roles(run).values())
    if run.cfg.algo.needs_reference and run.cfg.ref.log_prob_max_token_len_per_gpu is not None:
        tokens = max(tokens, run.cfg.ref.log_prob_max_token_len_per_gpu)
    head = tokens * 2 * width * shape.hidden + _head_forward(run, tokens)
    layer = tokens * passing_bytes(shape, width, run.kernel)
    return (
        _kept_state(run, params=True, optimizer=True)
        | _reference(run, awake=True)
        | {"working memory": factor * max(head, layer), "gathered weights": _gathered(run)}
    )


def _bucket_bytes(run: Run) -> float:
    """One buffer of a weight sync, which is as large as the largest tensor that the engine knows."""
    largest = run.engine_width * run.shape.vocab * run.shape.hidden
    wanted = run.cfg.rollout.update_weights_bucket_megabytes << 20
    return min(run.engine_width * run.shape.parameters, max(wanted, largest))


def _publishing(run: Run) -> Parts:
    """The trainer while it sends: one tensor gathered at a time. Optimizer state has left where it may."""
    optimizer = not run.takes_turns
    gathered = run.engine_width * run.shape.largest_parameter * (1 if run.shards == 1 else 2)
    return _kept_state(run, params=True, optimizer=optimizer) | _reference(run) | {"gathered weights": float(gathered)}


def _resting_trainer(run: Run) -> Parts:
    """What the trainer leaves on the device while engines generate."""
    if run.takes_turns:
        return _kept_state(run, params=False, optimizer=False) | _reference(run)
    if run.is_async:  # both work at once
        return _training(run)
    return _kept_state(run, params=True, optimizer=True) | _reference(run)


# --- engine ---


def engine_memory(run: Run) -> Engine:
    """What `rollout.gpu_memory_utilization` holds: with SGLang weights and cache alone, with vLLM its workspace too."""
    shape, rollout, ranks = run.shape, run.cfg.rollout, run.tensor_parallel
    count = run.engines_per_device
    share = rollout.gpu_memory_utilization * run.device.memory_bytes / count
    weights = run.engine_width * shape.parameters / ranks
    passing = run.engine_width * (4 * shape.hidden + 3 * _widest(run) / ranks)
    batched = rollout.max_num_batched_tokens or run.efficiency.prefill_tokens
    logits = SAMPLER_COPIES * FLOAT * rollout.max_num_seqs * shape.vocab
    workspace = batched * passing + logits
    split = min(ranks, shape.kv_heads)
    per_token = 2.0 * shape.softmax_layers * shape.key_size * run.engine_width / split
    states = shape.linear_layers * shape.linear_layer_numbers * FLOAT / ranks  # of a sequence
    cache = share - weights - (0.0 if rollout.name == "sglang" else workspace)
    longest = rollout.max_model_len or run.longest
    typical = (run.prompt_tokens + run.mean_length) * per_token + states
    problem = ""
    if cache < longest * per_token + states:
        least = count * (share - cache + longest * per_token + states) / run.device.memory_bytes
        problem = f"the engine's cache holds no {longest} tokens: rollout.gpu_memory_utilization needs {least:.2f}"
    return Engine(
        weights=weights,
        workspace=workspace,
        graphs=0.0 if rollout.enforce_eager else run.efficiency.graph_bytes,
        cache=max(0.0, cache),
        cache_token_bytes=per_token,
        tokens=max(0.0, cache) / per_token,
        slots=max(1, min(rollout.max_num_seqs, int(max(0.0, cache) / typical))),
        num_per_device=count,
        problem=problem,
    )


def _widest(run: Run) -> int:
    """Numbers of a token at the widest place of a layer."""
    shape = run.shape
    experts = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return max(shape.intermediate, experts, shape.query_size + 2 * shape.key_size)


# --- host ---


def host_memory(run: Run, engine: Engine) -> Parts:
    """One host, at its fullest: what has left the devices, and the processes. Files that are cached do not count."""
    pools, shape, constants = run.pools, run.shape, run.efficiency
    hosts = run.cfg.cluster.nnodes
    trainers, engines = pools.train / hosts, run.engines_per_device * pools.rollout / run.tensor_parallel / hosts
    resident, offloaded = _kept_state(run, params=False, optimizer=False), _kept_state(run, params=True, optimizer=True)
    moved = sum(offloaded.values()) - sum(resident.values()) if run.takes_turns else 0.0
    reference = sum(_reference(run, awake=True).values()) - sum(_reference(run).values())
    asleep = engine.parts["engine: weights"] * pools.rollout / hosts if run.takes_turns else 0.0
    batch = 64.0 * run.rows * run.longest  # columns of the driver's batch, and their copies on the way
    return _present(
        {
            "offloaded by the trainer": (moved + reference) * trainers,
            "weights of sleeping engines": asleep,
            "checkpoint read by rank 0": 2.0 * shape.parameters,
            "processes": trainers * constants.trainer_host_bytes
            + engines * constants.engine_host_bytes
            + constants.driver_host_bytes,
            "batch": batch,
        }
    )


def _present(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size > 0}
