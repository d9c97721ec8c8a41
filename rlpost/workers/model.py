"""From `model.*` to files on disk and the facts that trainer, engine and data must agree on."""

import fcntl
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.cloudpickle
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rlpost.registry import load_dotted
from rlpost.workers.config import ModelConfig

MAKER = "maker:"


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShape:
    """Of one model, what memory and kernels depend on; 0 where it is not known.

    Attributes:
        num_layers, num_kv_heads, head_dim: of attention.
        kv_size: numbers that one layer caches for one token.
        num_experts: 0 without mixture of experts.
        latent_attention: keys and values are cached as one latent vector (MLA).
    """

    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_size: int = 0
    num_experts: int = 0
    latent_attention: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelInfo:
    """Facts about a checkpoint.

    Attributes:
        path: local folder of the checkpoint.
        tokenizer_path: local folder of the tokenizer.
        vocab_size: ids that may be sampled: 0..vocab_size-1, the tokenizer's.
        embedding_size: rows of the embedding; larger than `vocab_size` when the checkpoint pads it.
        stop_token_ids: ids that end an answer: EOS of the tokenizer and of the generation config.
        max_position_embeddings: longest sequence that is computed as in training; 2**31 where positions are stretched.
        trust_remote_code, override_config: of the `model` section, for whoever loads the checkpoint.
        shape: see `ModelShape`.
    """

    path: str
    tokenizer_path: str
    vocab_size: int
    embedding_size: int
    stop_token_ids: tuple[int, ...]
    max_position_embeddings: int
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    shape: ModelShape = ModelShape()


def resolve_path(path: str, cache: Path, seed: int, key: str = "model.path") -> Path:
    """A local checkpoint folder for a folder, a hub id, or `maker:<dotted path>` of a `function(folder, seed)`.

    What a maker writes stays under `cache`, one folder for each maker and seed, and is made once.

    Raises:
        ValueError: neither a folder with a `config.json` nor something the hub can give; says what was tried.
    """
    if path.startswith(MAKER):
        dotted = path.removeprefix(MAKER)
        make = load_dotted(dotted, key)
        folder = cache / f"{dotted.rpartition('.')[2]}-seed{seed}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # parallel runs share the cache
            make(folder, seed)
        return folder
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local.resolve()
    if local.exists():
        raise ValueError(f"{key}={path}: this folder holds no config.json, so it is no Hugging Face checkpoint")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"{key}={path}: no such folder (and not a hub id, which reads 'owner/name')")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.pth", "original/*", "*.gguf"]))
    except Exception as error:  # the hub's client raises many kinds; all mean that it is not to be had
        raise ValueError(f"{key}={path}: no such folder, and the hub did not give it ({error})") from error


def load_tokenizer(path: str | Path, cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with `model.chat_template` in place of its own when that is set.

    Raises:
        ValueError: there is none, or its files do not load.
    """
    key = f"model.tokenizer_path={cfg.tokenizer_path}" if cfg.tokenizer_path else f"model.path={cfg.path}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise many kinds, bare `Exception` among them
        raise ValueError(f"{key}: no tokenizer loads from there ({error}); set model.tokenizer_path") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise ValueError(f"{key}: there is no tokenizer in this folder; set model.tokenizer_path to one that has it")
    if cfg.chat_template is not None:
        tokenizer.chat_template = cfg.chat_template
    return tokenizer


def portable_tokenizer(info: ModelInfo) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, ready to be sent to a process that has neither its files nor its code."""
    tokenizer = AutoTokenizer.from_pretrained(info.tokenizer_path, trust_remote_code=info.trust_remote_code)
    if (module := type(tokenizer).__module__).startswith("transformers_modules"):  # the checkpoint's own code
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    return tokenizer


def inspect(cfg: ModelConfig, cache: Path, seed: int) -> tuple[ModelInfo, PreTrainedTokenizerBase]:
    """Resolve `cfg.path` and read what everyone needs to know about it.

    Raises:
        ValueError: the checkpoint is not to be had, or its config or tokenizer does not load.
    """
    path = resolve_path(cfg.path, cache, seed)
    tokenizer_path = (
        resolve_path(cfg.tokenizer_path, cache, seed, "model.tokenizer_path") if cfg.tokenizer_path else path
    )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code, **cfg.override_config)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={cfg.path}: its config.json does not load ({error})") from error
    tokenizer = load_tokenizer(tokenizer_path, cfg)
    text = config.get_text_config()
    stops = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if (path / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(path).eos_token_id
        stops |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    info = ModelInfo(
        path=str(path),
        tokenizer_path=str(tokenizer_path),
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, text.vocab_size),  # ids may have gaps
        embedding_size=text.vocab_size,
        stop_token_ids=tuple(sorted(stops)),
        max_position_embeddings=_longest(text),
        trust_remote_code=cfg.trust_remote_code,
        override_config=cfg.override_config,
        shape=model_shape(text),
    )
    return info, tokenizer


def model_shape(text_config: Any) -> ModelShape:
    """Read the shape from a transformers config of a text model; its names differ from model to model."""

    def first(*names: str) -> int:
        return next((int(value) for name in names if (value := getattr(text_config, name, None))), 0)

    heads = first("num_attention_heads")
    kv_heads = first("num_key_value_heads") or heads
    head_dim = first("head_dim") or (first("hidden_size") // heads if heads else 0)
    latent = first("kv_lora_rank")
    return ModelShape(
        num_layers=first("num_hidden_layers"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_size=latent + first("qk_rope_head_dim") if latent else 2 * kv_heads * head_dim,
        num_experts=first("num_experts", "num_local_experts", "n_routed_experts"),
        latent_attention=bool(latent),
    )


def _longest(text_config: Any) -> int:
    """Tokens of the longest sequence; how far a stretched rotary embedding reaches is its own affair.

    "longrope" and "dynamic" have other frequencies for longer sequences than the model was first trained on, and choose
    them by what is computed at once. So they are only as long as those are the same for all.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    parts = [part for part in [rope, *rope.values()] if isinstance(part, dict)]
    kinds = {part.get("rope_type", "default") for part in parts}
    longest = getattr(text_config, "max_position_embeddings", None)
    if "longrope" in kinds:
        first = [
            part["original_max_position_embeddings"] for part in parts if "original_max_position_embeddings" in part
        ]
        longest = min([*first, getattr(text_config, "original_max_position_embeddings", None) or longest or 2**31])
    return (longest if kinds <= {"default", "longrope", "dynamic"} else None) or 2**31
