"""What is known to go wrong on ROCm, and what rlpost does about it: one table, each row with its source. Pure.

`examine` is asked before an engine starts; `python -m rlpost.tools.doctor` shows the rows that apply to a machine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Action(StrEnum):
    """What is done where a row applies."""

    SET = "set"  # variables in every process of the run
    DISABLE = "disable"  # one AITER family; refused instead when the user asked for that family by name
    REFUSE = "refuse"
    WARN = "warn"
    AVOIDED = "avoided"  # by how rlpost is written


@dataclass(slots=True, frozen=True, kw_only=True)
class Situation:
    """Everything that rows look at.

    Attributes:
        arch: "gfx942", "gfx950".
        hip: (major, minor) of ROCm.
        env: of the driver process.
        engine: "vllm", "sglang", "hf".
        families: AITER families that are to be on.
        insisted: those that the user turned on by name.
        dtype: the engine computes in, such as "bfloat16".
        sleep: the engine gives its memory back while training.
        head_dim, num_kv_heads, num_experts, latent_attention: of the model; 0 where not known, per tensor-parallel rank
            for `num_kv_heads`.
        quantized: the engine quantises weights.
        expert_parallel: experts are spread over ranks.
    """

    arch: str
    hip: tuple[int, int]
    env: Mapping[str, str] = field(default_factory=dict)
    engine: str = "vllm"
    families: frozenset[str] = frozenset()
    insisted: frozenset[str] = frozenset()
    dtype: str = "bfloat16"
    sleep: bool = True
    head_dim: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0
    latent_attention: bool = False
    quantized: bool = False
    expert_parallel: bool = False

    def expandable_segments(self) -> str:
        """The allocator setting that turns expandable segments on, as NAME=value; "" where none does."""
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        wrong = [f"{n}={self.env[n]}" for n in names if "expandable_segments:true" in self.env.get(n, "").lower()]
        return ", ".join(wrong)


@dataclass(slots=True, frozen=True, kw_only=True)
class Hazard:
    """One row: when it applies, what happens without care, what is done, and who says so."""

    name: str
    applies: Callable[[Situation], object]
    why: str
    action: Action
    fix: str  # what the user can do, or what rlpost did
    source: str
    env: Mapping[str, str] = field(default_factory=dict)  # of SET
    family: str = ""  # of DISABLE


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        name="ipc_leak",
        applies=lambda s: s.hip >= (7, 0),
        why="from ROCm 7 on memory that was exported over IPC stays allocated after it is freed: 6-7 GB a step when "
        "colocated",
        action=Action.SET,
        env={"HSA_ENABLE_IPC_MODE_LEGACY": "1"},
        fix="the older IPC mode, in trainer and engine alike",
        source="https://github.com/ROCm/hip/issues/3886 and https://github.com/radixark/miles/pull/1707",
    ),
    Hazard(
        name="scratch_reclaim",
        applies=lambda s: s.hip >= (7, 0),
        why="RCCL kernels that need more scratch memory than the reclaim threshold get it anew at each launch",
        action=Action.SET,
        env={"HSA_NO_SCRATCH_RECLAIM": "1"},
        fix="scratch memory stays with its queue",
        source="https://github.com/vllm-project/vllm/blob/v0.24.0/docker/Dockerfile.rocm_base",
    ),
    Hazard(
        name="expandable_segments",
        applies=lambda s: s.expandable_segments(),
        why="memory of expandable segments cannot be exported with hipIpcGetMemHandle, which weight updates and "
        "AITER's all-reduce use",
        action=Action.REFUSE,
        fix="unset it",
        source="https://github.com/ROCm/aiter/issues/4174 and https://github.com/radixark/miles/pull/2852",
    ),
    Hazard(
        name="release_keeps_memory",
        applies=lambda s: s.sleep and s.engine in ("vllm", "sglang") and s.hip < (7, 0),
        why="hipMemRelease gives no memory back before ROCm 6.4.2, so a sleeping engine keeps all of it",
        action=Action.REFUSE,
        fix="use ROCm 7, or rollout.free_cache_engine=false and a lower rollout.gpu_memory_utilization",
        source="https://github.com/ROCm/hip/issues/3781",
    ),
    Hazard(
        name="memory_saver_keeps_memory",
        applies=lambda s: s.sleep and s.engine == "sglang" and s.hip[0] == 7 and 2 <= s.hip[1] < 14,
        why="on ROCm 7.2 torch_memory_saver's pause, which is SGLang's sleep, frees nothing and the wake-up runs out "
        "of memory",
        action=Action.REFUSE,
        fix="use the image of docker/Dockerfile.rocm, or rollout.free_cache_engine=false and a lower "
        "rollout.gpu_memory_utilization",
        source="https://github.com/fzyzcjy/torch_memory_saver/issues/83",
    ),
    Hazard(
        name="memory_saver_gfx950",
        applies=lambda s: s.sleep and s.engine == "sglang" and s.arch == "gfx950" and s.hip >= (7, 14),
        why="torch_memory_saver has been seen to leak on gfx950",
        action=Action.WARN,
        fix="watch perf/max_memory_reserved_gb, and set rollout.free_cache_engine=false if it grows",
        source="https://github.com/vllm-project/vime/blob/main/scripts/run-qwen3-8B-amd.sh",
    ),
    Hazard(
        name="sleep_keeps_address_range",
        applies=lambda s: s.sleep and s.engine == "vllm",
        why="before vLLM 0.24 sleep unmapped memory but kept its address range, and the driver kept the memory with it",
        action=Action.AVOIDED,
        fix="rlpost needs vLLM 0.24 or newer; python -m rlpost.tools.doctor measures what sleep frees",
        source="https://github.com/vllm-project/vllm/pull/46203",
    ),
    Hazard(
        name="vllm_moe_shuffled",
        applies=lambda s: s.engine == "vllm" and s.num_experts and "moe" in s.families,
        why="AITER's MoE lays expert weights out anew after loading: writing plain weights over them, or binding new "
        "tensors under captured graphs, gives random text",
        action=Action.AVOIDED,
        fix="updates go through vLLM's layerwise reload, which lays them out again and copies in place; the parity "
        "gate watches",
        source="https://github.com/vllm-project/vllm/pull/31258 and https://github.com/ROCm/vllm/pull/849",
    ),
    Hazard(
        name="sglang_moe_shuffled",
        applies=lambda s: s.engine == "sglang" and s.num_experts and "moe" in s.families,
        why="SGLang lays expert weights out for AITER once, after loading; an update then writes plain ones over them",
        action=Action.DISABLE,
        family="moe",
        fix="experts run on Triton kernels",
        source="https://github.com/sgl-project/sglang/blob/v0.5.12/python/sglang/srt/layers/quantization/unquant.py",
    ),
    Hazard(
        name="sglang_fp8_shuffled",
        applies=lambda s: s.engine == "sglang" and s.quantized and s.families,
        why="SGLang lays FP8 weights out for AITER once more at each update, over the layout of the last",
        action=Action.REFUSE,
        fix="set rollout.aiter=off, or leave rollout.engine_kwargs.quantization out",
        source="https://github.com/sgl-project/sglang/pull/28963",
    ),
    Hazard(
        name="expert_map",
        applies=lambda s: s.engine == "vllm" and s.expert_parallel and "moe" in s.families,
        why="with expert parallelism, kernels other than AITER's read its expert mask as a map of slots (GSM8K 0.00 "
        "instead of 0.95)",
        action=Action.DISABLE,
        family="moe",
        fix="experts run on Triton kernels",
        source="https://github.com/vllm-project/vllm/pull/49758 and https://github.com/vllm-project/vllm/pull/47158",
    ),
    Hazard(
        name="attention_dtype",
        applies=lambda s: "attention" in s.families and s.dtype not in ("bfloat16", "float16"),
        why="AITER's attention computes in bfloat16 and float16 only",
        action=Action.DISABLE,
        family="attention",
        fix="attention runs on Triton kernels",
        source="https://github.com/vllm-project/vllm/blob/v0.24.0/vllm/v1/attention/backends/rocm_aiter_fa.py",
    ),
    Hazard(
        name="attention_head_dim",
        applies=lambda s: (
            s.engine == "vllm"
            and "attention" in s.families
            and not s.latent_attention
            and s.head_dim not in (0, 64, 128, 256)
        ),
        why="vLLM's ROCM_AITER_FA has kernels for head dimensions 64, 128 and 256 only",
        action=Action.DISABLE,
        family="attention",
        fix="attention runs on Triton kernels",
        source="https://github.com/vllm-project/vllm/blob/v0.24.0/vllm/v1/attention/backends/rocm_aiter_fa.py",
    ),
    Hazard(
        name="latent_attention_heads",
        applies=lambda s: (
            s.engine == "sglang"
            and "attention" in s.families
            and s.latent_attention
            and s.num_kv_heads not in (0, 16, 128)
        ),
        why="SGLang's AITER backend for latent attention (MLA) handles 16 or 128 heads a rank only",
        action=Action.DISABLE,
        family="attention",
        fix="attention runs on Triton kernels",
        source="https://github.com/sgl-project/sglang/blob/v0.5.12/python/sglang/srt/server_args.py",
    ),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Findings:
    """What the table says of a situation: rows that apply, variables to set, families left on, words for the user."""

    rows: tuple[Hazard, ...]
    env: dict[str, str]
    families: frozenset[str]
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]


def examine(situation: Situation) -> Findings:
    """Apply the table. A variable that the user exported keeps its value, with a warning where it differs."""
    rows = tuple(row for row in HAZARDS if row.applies(situation))
    env: dict[str, str] = {}
    families, warnings, refusals = set(situation.families), [], []
    for row in rows:
        if row.action is Action.SET:
            for name, value in row.env.items():
                env[name] = situation.env.get(name, value)
                if env[name] != value:
                    warnings.append(f"{name}={env[name]} is kept as exported, though {row.why} ({row.source})")
        elif row.action is Action.WARN:
            warnings.append(f"{row.why}: {row.fix} ({row.source})")
        elif row.action is Action.REFUSE:
            which = situation.expandable_segments() if row.name == "expandable_segments" else ""
            refusals.append(f"{which + ': ' if which else ''}{row.why}. To go on: {row.fix} ({row.source})")
        elif row.action is Action.DISABLE and row.family in situation.insisted:
            refusals.append(
                f"rollout.aiter_kernels.{row.family}=on: {row.why}. Set it to auto: then {row.fix} ({row.source})"
            )
        elif row.action is Action.DISABLE:
            families.discard(row.family)
            warnings.append(f"AITER {row.family} is off: {row.why}; {row.fix} ({row.source})")
    return Findings(
        rows=rows, env=env, families=frozenset(families), warnings=tuple(warnings), refusals=tuple(refusals)
    )
