"""What a step's parts cost, in seconds: a roofline of matrix products, memory traffic, links and hosts."""

from dataclasses import dataclass

from rlpost.tools.planning.activations import layer_bytes
from rlpost.tools.planning.memory import Engine, trained_parameters
from rlpost.tools.planning.run import Run
from rlpost.tools.simulation.lengths import LogNormal

FLOAT = 4
ADAM_BYTES = 28  # of memory traffic a parameter: weights, gradients and moments read, weights and moments written


@dataclass(slots=True, kw_only=True)
class Costs:
    """Named as in `rlpost.tools.simulation.scenario.Scenario`, whose unit is the device-second.

    Attributes:
        decode_step_s, decode_sequence_s: of an engine's host.
        device_step_s, device_sequence_s, prefill_token_s: of its device.
        infer_token_s: of an inference pass over all rows of a step, by column; see `Run.inferred`.
        train_token_s, update_s: of all trained roles together.
        sync_s, move_s: of a weight sync, and of memory that changes hands.
        mfu: model FLOPs of the training pass over the peak, recomputation not counted.
        bound: what decoding of full batches waits for: the engine's host or the device.
    """

    decode_step_s: float
    decode_sequence_s: float
    device_step_s: float
    device_sequence_s: float
    prefill_token_s: float
    infer_token_s: dict[str, float]
    train_token_s: float
    update_s: float
    sync_s: float
    move_s: float
    mfu: float
    bound: str


def predict_costs(run: Run, engine: Engine) -> Costs:
    """Of a step of mean lengths."""
    host_step, host_sequence = _decoding_host(run)
    device_step, device_sequence = _decoding_device(run, engine)
    on_host = host_step + engine.slots * host_sequence > device_step + engine.slots * device_sequence
    train, update, mfu = _training(run)
    peak = run.efficiency.matmul * run.device.flops_s * run.tensor_parallel * run.cfg.rollout.n  # samples share prompts
    return Costs(
        decode_step_s=host_step,
        decode_sequence_s=host_sequence,
        device_step_s=device_step,
        device_sequence_s=device_sequence,
        prefill_token_s=2 * run.shape.active_parameters / peak * _turns(run),
        infer_token_s={name: _inference(run, name) for name in run.inferred},
        train_token_s=train,
        update_s=update,
        sync_s=_sync(run),
        move_s=_move(run, engine),
        mfu=mfu,
        bound="host" if on_host else "device",
    )


def layer_flops(run: Run) -> float:
    """Of the forward pass of all layers for one token; attention over half of a sequence of mean length."""
    context = (run.prompt_tokens + run.mean_length) / 2
    return 2.0 * run.shape.layer_matmul + 4.0 * run.shape.softmax_layers * run.shape.query_size * context


def _forward_s(run: Run) -> float:
    """Of all layers for one token."""
    return _layers_s(run, 1, run.efficiency.forward_traffic * _compiled(run, run.efficiency.compiled_forward))


def _backward_s(run: Run) -> float:
    return _layers_s(run, 2, run.efficiency.backward_traffic * _compiled(run, run.efficiency.compiled_backward))


def _compiled(run: Run, share: float) -> float:
    return share if run.compiled else 1.0


def _layers_s(run: Run, flops_factor: float, traffic: float) -> float:
    kept = run.shape.layers * layer_bytes(run.shape, run.train_width, run.kernel)
    peak = run.efficiency.matmul * run.device.flops_s
    return flops_factor * layer_flops(run) / peak + traffic * kept / run.device.memory_bytes_s


def _head_s(run: Run, products: int, compiled: float) -> float:
    """One direction of the logprob head, for those tokens whose logprob is wanted."""
    shape, device = run.shape, run.device
    flops = products * 2.0 * shape.vocab * shape.hidden / (run.efficiency.matmul * device.flops_s)
    passes = run.efficiency.head_passes * _compiled(run, compiled)
    return run.wanted * (flops + passes * FLOAT * shape.vocab / device.memory_bytes_s)


def _inference(run: Run, column: str) -> float:
    """Device-seconds a token of one inference pass."""
    head = 0.0 if column == "values" else _head_s(run, 1, run.efficiency.compiled_forward)
    return _gathered(run, _forward_s(run) + head, passes=1)


def _training(run: Run) -> tuple[float, float, float]:
    """Device-seconds a token, seconds an update, and the MFU."""
    constants, shape = run.efficiency, run.shape
    layers = _forward_s(run) + _backward_s(run)
    if run.cfg.model.enable_gradient_checkpointing:
        layers += _forward_s(run)
    head = _head_s(run, 1, constants.compiled_forward) + _head_s(run, 3, constants.compiled_backward)
    actor = _gathered(run, layers + head, passes=2)
    critic = _gathered(run, layers, passes=2) if run.cfg.algo.needs_critic else 0.0
    trained = trained_parameters(run, "actor") / run.shards
    update = constants.update_s + ADAM_BYTES * trained / (constants.bandwidth * run.device.memory_bytes_s)
    flops = 3 * (layer_flops(run) + run.wanted * 2.0 * shape.vocab * shape.hidden)
    return actor + critic, update * (2 if critic else 1), flops / actor / run.device.flops_s


def _gathered(run: Run, token_s: float, passes: int) -> float:
    """Device-seconds a token where FSDP gathers (and sums up) beside the computation; the longer of the two counts."""
    if run.shards == 1:
        return token_s
    _, num_micro = run.micro_batch(run.cfg.actor)
    tokens = run.tokens / run.pools.train / run.updates / num_micro  # of a micro-batch, on one rank
    moved = passes * run.train_width * run.shape.parameters  # gathered for each pass
    if passes == 2 and not run.cfg.model.lora_rank:
        moved += FLOAT * run.shape.parameters  # gradients
    several = run.cfg.cluster.nnodes > 1 and run.shards > (run.cfg.cluster.n_gpus_per_node or 1)
    link = run.device.network_bytes_s if several else run.device.link_bytes_s
    communication = moved * (run.shards - 1) / run.shards / (run.efficiency.collective * link)
    return max(token_s / run.efficiency.sharded, communication / tokens)


def _decoding_host(run: Run) -> tuple[float, float]:
    """Seconds of a decoding step in an engine's processes, and for each of its sequences."""
    constants = run.efficiency
    return constants.host_step_s, constants.host_sequence_s + constants.logprob_s / run.cfg.logprobs_every


def _decoding_device(run: Run, engine: Engine) -> tuple[float, float]:
    """Seconds of a decoding step on the device, and for each of its sequences; engines of one device take turns."""
    constants, shape, ranks = run.efficiency, run.shape, run.tensor_parallel
    bandwidth = constants.bandwidth * run.device.memory_bytes_s
    step = engine.weights * _read_share(run, engine.slots) / bandwidth + shape.layers * constants.layer_s
    if ranks > 1:
        step += 2 * shape.layers * constants.all_reduce_s
    lengths = LogNormal(run.mean_length, run.workload.tail, run.cfg.data.max_response_length)
    context = run.prompt_tokens + lengths.mean_position
    states = shape.linear_layers * shape.linear_layer_numbers * FLOAT / ranks
    read = context * engine.cache_token_bytes + 2 * states + constants.logit_bytes * shape.vocab
    sequence = read / bandwidth + 2.0 * shape.active_parameters / ranks / (constants.matmul * run.device.flops_s)
    turns = _turns(run)
    return turns * step, turns * sequence


def _turns(run: Run) -> float:
    """How many times as long as alone an engine waits for a device that it may share with others."""
    return run.engines_per_device / (run.efficiency.shared_card if run.engines_per_device > 1 else 1.0)


def _read_share(run: Run, batch: int) -> float:
    """Of an engine's weights, those that a step of `batch` sequences reads: experts that nobody asks for are not."""
    shape = run.shape
    if not shape.experts:
        return 1.0
    experts = shape.layers * shape.experts * shape.expert_matrices / shape.parameters
    return 1.0 - experts * (1.0 - shape.experts_per_token / shape.experts) ** batch


def _sync(run: Run) -> float:
    return run.efficiency.sync_s + run.engine_width * run.shape.parameters / run.efficiency.sync_bytes_s


def _move(run: Run, engine: Engine) -> float:
    """What a colocated step spends on handing memory over: there and back through the host's link."""
    if not run.takes_turns:
        return 0.0
    fsdp, parameters = run.cfg.actor.fsdp, run.shape.parameters
    numbers = (parameters if fsdp.param_offload else 0) + (
        2 * trained_parameters(run, "actor") if fsdp.optimizer_offload else 0
    )
    moved = 2 * FLOAT * numbers / run.shards + 2 * engine.parts["engine: weights"]
    return run.efficiency.move_s + moved / run.device.host_bytes_s
