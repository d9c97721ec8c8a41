"""The quickstart's model: a tiny language model that adds, but has learned a bad habit for RL to undo.

It is trained for less than a minute on a book of two-digit sums in which most answers above 99 lack their hundred
(`57+68=25`). It therefore knows how to add, answers 40 % of the problems correctly when it takes its likeliest token,
and now and then samples the missing digit: a reward for exact answers is all it needs to learn when to write it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlpost.tasks.addition import problems
from rlpost.tasks.checkpoint import clear, finished, mark

CHARACTERS = "0123456789+-*/=() ?.,"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
Problem = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the habit is taught; a checkpoint made by another recipe is made anew."""

    habit: float = 0.85  # share of the answers above 99 that lack their hundred
    steps: int = 500
    batch_size: int = 64
    lr: float = 2e-3  # at its peak; warms up, then falls linearly to 0
    warmup: int = 50


RECIPE = Recipe()


def make_quickstart(folder: str | Path, seed: int = 0) -> dict[str, Any]:
    """Write the checkpoint and its tokenizer into `folder`, unless they are there for this seed; returns facts.

    Returns:
        `accuracy`: greedy, on held-out problems; `num_parameters`; `steps`: supervised updates.
    """
    folder, request = Path(folder), {"maker": "quickstart", "seed": seed, **asdict(RECIPE)}
    if (facts := finished(folder, request)) is not None:
        return facts
    clear(folder)
    tokenizer = character_tokenizer()
    with one_thread(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = tiny_model(tokenizer)
        train(model, tokenizer, seed)
        accuracy = greedy_accuracy(model, tokenizer, problems(size=400, seed=seed, split="val"))
    facts = {"accuracy": accuracy, "num_parameters": model.num_parameters(), "steps": RECIPE.steps}
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    mark(folder, request, facts)
    return facts


@contextmanager
def one_thread() -> Iterator[None]:
    """The same sums on every machine; and for matrices this small, threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: byte-pair encoding without merges. No BOS and no chat template."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """0.8M parameters of the Qwen3 architecture; wide and shallow, since a decoding step costs time by the layer."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.06,  # at the usual 0.02 a model this narrow takes twice the steps
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised training on training problems, with the loss on the answers only."""
    book, draw = problems(size=7000, seed=seed, split="train"), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.lr, betas=(0.9, 0.98))
    steps, warmup = RECIPE.steps, RECIPE.warmup
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warmup, 1 - s / steps))
    model.train()
    for _ in range(steps):
        page = draw.choices(book, k=RECIPE.batch_size)
        ids, is_answer = encode(page, [habitual_answer(p, draw) for p in page], tokenizer)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits[is_answer[:, 1:]], ids[:, 1:][is_answer[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def habitual_answer(problem: Problem, draw: random.Random) -> str:
    """What the book says: the sum, often without its hundred."""
    answer = problem["ground_truth"]
    return answer[-2:] if len(answer) > 2 and draw.random() < RECIPE.habit else answer


def encode(
    page: Sequence[Problem], answers: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[B, T]`, padded on the right, and where an answer or its EOS stands, bool `[B, T]`."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts = tokenizer([p["prompt"] for p in page])["input_ids"]
    tails = [ids + [eos] for ids in tokenizer(list(answers))["input_ids"]]
    length = max(len(p) + len(t) for p, t in zip(prompts, tails, strict=True))
    ids = torch.full((len(page), length), pad)
    is_answer = torch.zeros(len(page), length, dtype=torch.bool)
    for row, (prompt, tail) in enumerate(zip(prompts, tails, strict=True)):
        ids[row, : len(prompt) + len(tail)] = torch.tensor(prompt + tail)
        is_answer[row, len(prompt) : len(prompt) + len(tail)] = True
    return ids, is_answer


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, page: Sequence[Problem]) -> float:
    """Share of `page` that the model answers exactly when it takes the likeliest token each time.

    One forward pass suffices: decoding gives the answer just when every token of it, EOS included, is the likeliest one
    after those before it.
    """
    model.eval()
    ids, is_answer = encode(page, [p["ground_truth"] for p in page], tokenizer)
    likeliest = model(input_ids=ids[:, :-1]).logits.argmax(-1)
    right = (likeliest == ids[:, 1:]) | ~is_answer[:, 1:]
    return right.all(1).float().mean().item()
