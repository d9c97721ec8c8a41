"""What is known of every key: its type, default and meaning, from the schemas; who reads it; verl's name for it.

A meaning is the comment behind the field, in the source of its dataclass; so it stands where the key is declared.
"""

import ast
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from rlpost.config import VARIANTS, Config
from rlpost.rules.reads import readers_of, written
from rlpost.verl_keys import verl_names

# where the code is that receives a section
HOMES = {
    "algo": "rlpost/algos",
    "model": "rlpost/workers/model.py, rlpost/workers/engine",
    "actor": "rlpost/workers/model_worker.py, rlpost/workers/engine",
    "critic": "rlpost/workers/model_worker.py, rlpost/workers/engine",
    "ref": "rlpost/workers/model_worker.py",
    "rollout": "rlpost/workers/rollout, rlpost/workers/weight_sync",
    "reward": "rlpost/rewards",
    "data": "rlpost/data.py, rlpost/data_adapters.py",
    "trainer": "rlpost/trainer",
    "cluster": "rlpost/trainer/build.py",
    "tracking": "rlpost/tracking",
    "seed": "rlpost/trainer/build.py",
    "cache_dir": "rlpost/trainer/build.py",
}

HEAD = """# Every key

`python -m rlpost.tools.explain KEY` says this of one; the beginning of a key, or verl's name, will do. "Only read by"
is checked: a key that is set on the command line and that nothing in the run reads is an error. A `*` stands for a name
of your own. Defaults are those of the schemas; `config/config.yaml` chooses the quickstart's model and data, which
bring their own values. This page is written from the schemas by `python -m rlpost.tools.explain --write docs`.

Names below a key of type `dict` are yours: `rollout.engine_kwargs.enable_prefix_caching=false` hands the engine an
argument, `model.override_config.rope_theta=1e6` the model's config, `tracking.wandb.mode=offline` wandb; a whole map,
`'rollout.engine_kwargs={a: 1, b: 2}'`, adds to what is there. Hydra's `+` or `++` before such a key changes nothing.
A key of type `Any` takes a text or a list, `data.val_files` also a map; a list or map replaces what was there.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: dotted `name` (`*` stands for a name of the user's), `type` and `default` as one writes them in YAML.

    `choice` is the one of a group that alone has this key, such as `trainer=fully_async`, or "".
    """

    name: str
    type: str
    default: str
    meaning: str
    choice: str = ""

    @property
    def verl(self) -> list[str]:
        """verl's names."""
        return verl_names(self.name)

    @property
    def readers(self) -> list[str]:
        """Who reads it, where not every run does, and how one gets them."""
        return [f"{reader.by} ({reader.fix.removeprefix('set ')})" for reader in readers_of(self.name)]


@functools.cache
def all_documented() -> tuple[Key, ...]:
    """Every key, section by section in the order of the schemas."""
    keys = {key.name: key for key in _walk(Config, "")}
    for group, variants in VARIANTS.items():
        for choice, schema in variants.items():
            keys |= {k.name: k for k in _walk(schema, f"{group}.", f"{group}={choice}") if k.name not in keys}
    order = list(dict.fromkeys(name.partition(".")[0] for name in keys))
    return tuple(sorted(keys.values(), key=lambda key: order.index(key.name.partition(".")[0])))


def section_meaning(section: str) -> str:
    """The first line of a section's docstring, "" for a key of the root."""
    schema = {field.name: field.type for field in fields(Config)}[section]
    return (inspect.getdoc(schema) or "").partition("\n")[0] if is_dataclass(schema) else ""


def config_markdown() -> str:
    """docs/config.md."""
    lines = [HEAD]
    section = None
    for key in all_documented():
        if (own := key.name.partition(".")[0] if "." in key.name else "the root") != section:
            section = own
            lines += [*([""] if len(lines) > 1 else []), f"## {section}", ""]
            lines += [section_meaning(section), ""] if section != "the root" else []
            lines += ["| key | type | default | meaning | only read by | verl |", "|---|---|---|---|---|---|"]
        meaning = f"with `{key.choice}`: {key.meaning}" if key.choice else key.meaning
        cells = (f"`{key.name}`", key.type, f"`{key.default}`", meaning, "; ".join(key.readers))
        verl = ", ".join(f"`{name}`" for name in key.verl if name != key.name) or ("the same" if key.verl else "")
        lines.append("| " + " | ".join((*(cell.replace("|", "\\|") for cell in cells), verl)) + " |")
    return "\n".join(lines) + "\n"


def _walk(schema: type, prefix: str, choice: str = "") -> Iterator[Key]:
    notes, hints = _notes(schema), get_type_hints(schema)
    defaults = OmegaConf.structured(schema)
    for field in fields(schema):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        item = next((a for a in get_args(kind) if is_dataclass(a)), None)
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _walk(kind, f"{name}.", choice)
            continue
        default = "must be set" if OmegaConf.is_missing(defaults, field.name) else as_yaml(defaults[field.name])
        yield Key(name, _type(kind), default, notes.get(field.name, ""), choice)
        if item is not None:
            assert isinstance(item, type)
            yield from _walk(item, f"{name}.*.", choice)


def as_yaml(value: Any) -> str:
    """A value of a config as one writes it in YAML."""
    return written(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def _type(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    text = re.sub(r"\b[a-z]\w*\.(?=\w)", "", text)  # modules
    return text.replace("None", "null").replace(" | ", " or ")


def _notes(schema: type) -> dict[str, str]:
    """The comment behind each field; a base class speaks for the fields it declares."""
    notes: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        source = inspect.getsource(cls)
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and not token.line.lstrip().startswith("#")
        }
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                said = comments.get(node.lineno) or comments.get(node.end_lineno or node.lineno)
                notes |= {node.target.id: said} if said else {}
    return notes
