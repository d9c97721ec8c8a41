"""Weights, tokenizer and prompts that all systems share.

    python -m benchmarks.peers.materials --shape 0.6b --lengths longtail --tokenizer SMOLLM2 --out FOLDER

A process of its own, since it may use the GPU that the systems are to find empty.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import AutoTokenizer

from benchmarks import shapes
from benchmarks.peers.cell import MICRO_TOKENS, SEED, Lengths, num_stop_ids, parse_lengths
from benchmarks.shapes import VOCABULARY
from rlpost.tasks.checkpoint import clear, finished, mark

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NAMES = ("Ana", "Ben", "Chi", "Dev", "Eli")
QUESTION = (
    "{name} has {boxes} boxes with {pencils} pencils each and gives away {given} pencils. How many pencils are left? "
    "Think step by step and end with the number."
)


def make_tokenizer(source: Path, folder: Path, vocabulary: int) -> None:
    """Copy a byte-level BPE tokenizer, with unused entries up to `vocabulary`, so that no system masks an id.

    Raises:
        ValueError: the tokenizer that results has another size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    taken = {*ids.values(), *(token["id"] for token in content["added_tokens"])}
    ids.update({f"<unused_{i}>": i for i in range(vocabulary) if i not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    found = len(AutoTokenizer.from_pretrained(str(folder)))
    if found != vocabulary:
        raise ValueError(f"{source}: its tokenizer grew to {found} entries, not {vocabulary}")


def without_eos(source: Path, folder: Path) -> None:
    """The same tokenizer, which names no EOS, and the model's config, without which it is no tokenizer's folder."""
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(folder))
    shutil.copy(source / "config.json", folder / "config.json")
    assert AutoTokenizer.from_pretrained(str(folder)).eos_token_id is None, folder


def stop_ids(lengths: Lengths, vocabulary: int, eos: int) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS and unused ids drawn with `SEED`; none for fixed lengths."""
    count = num_stop_ids(lengths, vocabulary)
    others = random.Random(SEED).sample(range(vocabulary // 3, vocabulary), count - 1) if count else []
    return sorted([eos, *others]) if count else []


def make_model(shape_name: str, lengths: Lengths, source: Path, folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Random weights of a Qwen3 shape in bfloat16 with its tokenizer, unless they are there."""
    request = {"shape": shape_name, "lengths": lengths.name, "vocabulary": vocabulary, "source": str(source)}
    if finished(folder, request) is not None:
        return
    clear(folder)
    make_tokenizer(source, folder, vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    config = shapes.config(
        shape_name,
        vocab_size=vocabulary,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    count = shapes.write(config, folder, stop_ids(lengths, vocabulary, tokenizer.eos_token_id), SEED)
    without_eos(folder, folder / "no_eos")
    mark(folder, request, {"num_parameters": count})


def adapt_checkpoint(source: Path, folder: Path) -> None:
    """A checkpoint that is there already: its files, and the tokenizer without EOS beside them."""
    request = {"source": str(source)}
    if finished(folder, request) is not None:
        return
    clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("."):
            (folder / path.name).symlink_to(path.resolve())
    without_eos(folder, folder / "no_eos")
    mark(folder, request, {})


def prompt_rows(count: int) -> list[dict[str, Any]]:
    """Word problems as chat messages, in verl's columns."""
    draw, rows = random.Random(SEED), []
    for index in range(count):
        boxes, pencils, given = (draw.randint(2, 99) for _ in range(3))
        text = QUESTION.format(name=draw.choice(NAMES), boxes=boxes, pencils=pencils, given=given)
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "data_source": "pencils",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(boxes * pencils - given)},
                "extra_info": {"index": index},
            }
        )
    return rows


def write_prompts(stem: Path, count: int) -> None:
    """`<stem>.jsonl` and `<stem>.parquet`."""
    rows = prompt_rows(count)
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stem.with_suffix(".parquet"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help=f"{', '.join(MICRO_TOKENS)}, or a checkpoint's folder")
    parser.add_argument("--lengths", type=parse_lengths, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is extended")
    parser.add_argument("--num-prompts", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.shape in MICRO_TOKENS:
        make_model(args.shape, args.lengths, args.tokenizer, args.out, args.vocabulary)
    else:
        adapt_checkpoint(Path(args.shape), args.out)
    write_prompts(args.out / "prompts", args.num_prompts)


if __name__ == "__main__":
    main()
