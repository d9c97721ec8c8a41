"""What is this key? `python -m rlpost.tools.explain KEY [KEY ...]`.

KEY is a key (`actor.optim.lr`), the beginning of some (`algo.kl_ctrl`, `trainer`), or verl's name for one
(`actor_rollout_ref.rollout.n`). Says type, default, meaning, who reads it, and verl's name.
"""

import argparse
import sys
from dataclasses import is_dataclass
from pathlib import Path

from omegaconf import OmegaConf

from rlpost.config import explain_compose_error, named, opened, register
from rlpost.overrides import compose
from rlpost.reference import HOMES, Key, all_documented, as_yaml, config_markdown
from rlpost.verl_keys import from_verl, ours_of
from rlpost.verl_keys import markdown as verl_markdown

PAGES = {"config.md": config_markdown, "verl_keys.md": verl_markdown}


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 2 where a key is unknown."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.tools.explain", description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=f"write {' and '.join(PAGES)} there")
    args = parser.parse_args(arguments)
    if not args.keys and args.write is None:
        parser.error("name a key, the beginning of some, or verl's name for one")
    if args.write is not None:
        for name, page in PAGES.items():
            (args.write / name).write_text(page())
    status = 0
    for asked in args.keys:
        text = explain(asked.partition("=")[0].lstrip("+~"))
        if text is None:
            print(explain_compose_error(f"Key '{asked}' is not in the config"), file=sys.stderr)
            status = 2
        else:
            print(text)
    return status


def explain(asked: str) -> str | None:
    """All that is known of a key, of the keys below a prefix, or of verl's key; None where there is nothing."""
    documented = {key.name: key for key in all_documented()}
    for at, item in opened(asked).items():  # names of the user's, below some of which nothing is declared
        asked = asked if is_dataclass(item) else at
    if thing := named(asked):
        asked = asked.replace(f"{thing[0]}.{thing[1]}", f"{thing[0]}.*", 1)
    if asked in documented:
        return details(documented[asked])
    if said := from_verl(asked):
        ours = ours_of(asked)
        return said + ("" if ours is None else f"\n\n{explain(ours)}")
    if below := [key for key in documented.values() if key.name.startswith((f"{asked}.", asked)) and asked]:
        return "\n".join(overview(below))
    return None


def details(key: Key) -> str:
    """One key, a line for each thing that is known."""
    register()
    composed = OmegaConf.select(compose([key.choice] if key.choice else [])[0], key.name, throw_on_missing=False)
    default, present = key.default, as_yaml(composed)
    if "*" not in key.name and present != default:
        default += f" (the root config sets {present})"
    rows = {
        "type": key.type,
        "default": default,
        "only with": key.choice,
        "read by": "; ".join(key.readers) or "every run",
        "code": HOMES.get(key.name.partition(".")[0], ""),
        "verl": ", ".join(key.verl),
    }
    lines = [f"  {label:<10}{value}" for label, value in rows.items() if value]
    return "\n".join([key.name, f"  {key.meaning}", *lines])


def overview(keys: list[Key]) -> list[str]:
    """A line for each key."""
    width = max(len(key.name) for key in keys)
    return [f"{key.name:<{width}}  {key.default:<12}  {key.meaning}" for key in keys]


if __name__ == "__main__":
    sys.exit(main())
