"""What is measured: one model shape, one distribution of answer lengths, the same for every system."""

import re
from dataclasses import dataclass

SEED = 0
MAX_PROMPT = 256  # tokens; the prompts made here take about 70


# tokens of one forward and backward pass; without recomputed activations they fit 141 GB with room
MICRO_TOKENS = {"0.6b": 16_384, "1.7b": 8192, "tiny": 1024}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long answers are: all `longest` tokens, or min(geometric, `longest`) with the mean `mean`."""

    name: str
    longest: int
    mean: float | None = None

    @property
    def fixed(self) -> bool:
        """No answer ends before `longest`."""
        return self.mean is None

    @property
    def text(self) -> str:
        """As `parse_lengths` reads it."""
        return self.name.replace("-", ":")


def parse_lengths(text: str) -> Lengths:
    """`fixed512` (any number), `longtail` (mean 1,024, up to 4,096) or `longtail:MEAN:LONGEST`.

    Raises:
        ValueError: it is neither, or the mean cannot be had.
    """
    if found := re.fullmatch(r"fixed(\d+)", text):
        return Lengths(name=text, longest=int(found[1]))
    if found := re.fullmatch(r"longtail(?::(\d+):(\d+))?", text):
        mean, longest = int(found[1] or 1024), int(found[2] or 4096)
        if not 1 < mean < longest:
            raise ValueError(f"--lengths {text}: the mean must lie between 1 and the longest")
        return Lengths(name=text.replace(":", "-"), longest=longest, mean=mean)
    raise ValueError(f"--lengths {text}: expected fixed512 (any number), longtail or longtail:MEAN:LONGEST")


def mean_length(stop: float, longest: int) -> float:
    """Mean of min(G, longest) for a geometric G with the probability `stop` a token: (1 - (1 - p)^L) / p."""
    return (1 - (1 - stop) ** longest) / stop


def stop_probability(mean: float, longest: int) -> float:
    """The probability a token at which `mean_length` is `mean`, by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, longest) > mean else (low, middle)
    return (low + high) / 2


def num_stop_ids(lengths: Lengths, vocabulary: int) -> int:
    """How many ids of a vocabulary have to end an answer, if a random model draws each alike; 0 where none may."""
    if lengths.mean is None:
        return 0
    return max(1, round(stop_probability(lengths.mean, lengths.longest) * vocabulary))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One column of work for all systems.

    Attributes:
        model: checkpoint folder, with its tokenizer; its generation config lists the ids that end an answer.
        no_eos: folder of the same tokenizer without an EOS, for who cannot be told to ignore it.
        prompts: `.jsonl` and `.parquet` of the same chat prompts, by this stem.
        num_prompts, num_samples: of a step.
        gpu_memory_utilization: the engine's share of the card.
        engine: vllm, or hf where there is no GPU.
    """

    model: str
    no_eos: str
    prompts: str
    lengths: Lengths
    num_prompts: int
    num_samples: int
    steps: int
    micro_tokens: int
    gpu_memory_utilization: float = 0.5
    engine: str = "vllm"

    @property
    def num_sequences(self) -> int:
        """Of a step."""
        return self.num_prompts * self.num_samples
