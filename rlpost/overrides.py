"""What the user said, as against what the config comes to: the command line, sweeps and the experiment file."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf, RuntimeConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlpost.config import CONFIG_DIR, SCHEMAS, SECTIONS, Config, explain_compose_error, typed_and_problems
from rlpost.open_keys import below_any, hydra_words
from rlpost.rules.reads import unread, value_at, written
from rlpost.verl_keys import from_verl

logger = logging.getLogger(__name__)

_QUOTES = "\"' "
GROUPS = (*SECTIONS, "experiment")
MISFIT = (HydraException, OmegaConfBaseException, AttributeError)  # AttributeError: `+key=...` beyond the schema


@dataclass(slots=True)
class Verdict:
    """What is to be said of what the user stated.

    Attributes:
        unread: what the command line sets and nothing reads: key -> message.
        problems: where an experiment contradicts itself.
        remarks: what an experiment of the user's sets for components that were not selected; no mistake.
    """

    unread: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_overrides(overrides: list[str]) -> str | None:
    """Compose once for every choice of every sweep; all that is wrong with the first that fails, or None.

    A key counts as unread when no job of the sweep reads it: `algo=ppo,grpo critic.optim.lr=1e-5` is fine.
    """
    if unreadable := _unreadable(overrides):
        others = check_overrides([word for word in overrides if word not in unreadable])
        return "\n".join([*unreadable.values(), *filter(None, [others])])
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [_choices(override) for override in parsed if not isinstance(override.value(), Glob)]
    first = [of_one[0] for of_one in choices]
    trials = [first] + [
        [*first[:i], other, *first[i + 1 :]] for i, of_one in enumerate(choices) for other in of_one[1:]
    ]
    dead: list[dict[str, str]] = []
    for trial in trials:
        problems, unread_here = _look(trial)
        if problems:
            return "\n".join([*problems, *(unread_here.values() if len(trials) == 1 else ())])
        dead.append(unread_here)
    return "\n".join(text for key, text in dead[0].items() if all(key in other for other in dead)) or None


def _unreadable(overrides: list[str]) -> dict[str, str]:
    """Words that Hydra's grammar does not know -> what is wrong with each."""
    wrong: dict[str, str] = {}
    for word in overrides:
        try:
            OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            key, equals, value = word.partition("=")
            lines = str(error).splitlines()
            reason = next((line for line in lines if not line.startswith("Error parsing")), "not its grammar")
            if not equals or not value or key != key.strip() or not key:
                fix = "write key=value, without spaces around the ="
            else:
                fix = f"quote the value, twice for the shell's sake: '{key}=\"{value.strip(_QUOTES)}\"'"
            wrong[word] = f"{word}: no key=value that can be read ({reason.partition(': ')[0].strip()}); {fix}"
    return wrong


def _look(overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """What is wrong with one composition, and what nothing reads in it; overrides that do not fit are left out."""
    if nameless := _below_no_map(overrides):
        problems, unread_here = _look([override for override in overrides if override not in nameless])
        return [*nameless.values(), *problems], unread_here
    try:
        cfg, runtime = compose(overrides)
        if schemas := [f"{group}={choice}" for group, choice in runtime.choices.items() if choice in SCHEMAS]:
            return [f"{schemas[0]}: what the other choices are made of, and none itself; see --help"], {}
        typed, problems = typed_and_problems(cfg)
    except MISFIT as error:
        fitting, misfits = _without_misfits(overrides, error)
        problems, unread_here = _look(fitting) if fitting else ([], {})
        return misfits + problems, unread_here
    except ValueError as error:  # a check that could not go on after what it found
        return [str(error)], {}
    verdict = judge(typed, runtime, overrides)
    return problems + verdict.problems, verdict.unread


def _below_no_map(overrides: list[str]) -> dict[str, str]:
    """Overrides that name a part of a text or a list, which Hydra would drop for them -> what is wrong with each."""
    below = below_any(overrides)
    keys = set(below.values())
    parsed = OverridesParser.create().parse_overrides(overrides)
    whole = [o.input_line or "" for o in parsed if _chooses(o) or o.key_or_group in keys]
    try:
        values = {key: OmegaConf.select(compose(whole)[0], key) for key in keys}
    except MISFIT:  # told by who composes all
        return {}
    return {
        word: f"{word.lstrip('+')}: {key}={written(values[key])} has no names; give all of it as a list, "
        f"{key}=[..., {word.partition('=')[2]}]"
        for word, key in below.items()
        if values[key] is not None and not OmegaConf.is_dict(values[key])
    }


def compose(overrides: list[str]) -> tuple[DictConfig, RuntimeConf]:
    """The composed config, and what Hydra says of how it was made (`hydra.runtime`). Takes words as they are typed.

    Raises:
        HydraException, OmegaConfBaseException: an override that does not fit.
    """
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = hydra.compose("config", hydra_words(overrides), return_hydra_config=True)
    finally:
        GlobalHydra.instance().clear()
    runtime = composed.hydra.runtime
    with open_dict(composed):
        del composed["hydra"]
    return composed, runtime


def check_stated(cfg: Config, hydra_cfg: HydraConf) -> None:
    """Once more in the job itself, which may have been composed of files that `check_overrides` does not know.

    Raises:
        ValueError: what the command line sets and nothing reads, save in a sweep; or an experiment that contradicts
            itself.
    """
    verdict = judge(cfg, hydra_cfg.runtime, list(hydra_cfg.overrides.task))
    if hydra_cfg.mode != RunMode.MULTIRUN:
        verdict.problems += verdict.unread.values()
    if verdict.problems:
        raise ValueError("\n".join(verdict.problems))
    for remark in verdict.remarks:
        logger.info(remark)


def judge(cfg: Config, runtime: RuntimeConf, overrides: list[str]) -> Verdict:
    """Hold what `overrides` and the experiment state against what is read.

    An experiment is reused with other algorithms, so it may set what these do not read; but what its own values leave
    unread is a mistake in it.
    """
    stated = stated_keys(overrides)
    verdict = Verdict(unread={key: message for key, (message, _) in unread(cfg, stated).items()})
    name = runtime.choices.get("experiment")
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    path = next((p for f in folders if name and (p := f / "experiment" / f"{name}.yaml").is_file()), None)
    own = {key: value for key, value in experiment_keys(path).items() if key not in stated} if path else {}
    elsewhere: dict[str, list[str]] = {}
    for key, (message, reader) in unread(cfg, own).items():
        if any(decider in own and value_at(cfg, decider) == own[decider] for decider in reader.decided_by):
            verdict.problems.append(f"experiment={name}: {message}")
        else:
            elsewhere.setdefault(reader.by, []).append(key)
    if path is not None and not path.is_relative_to(CONFIG_DIR):
        for by, keys in elsewhere.items():
            verdict.remarks.append(f"experiment={name} also sets {', '.join(keys)}, which is for {by}")
    return verdict


def experiment_keys(path: Path) -> dict[str, Any]:
    """The values that an experiment file states itself, by dotted key."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return dict(_leaves({str(k): v for k, v in content.items() if k in Config.__dataclass_fields__}))


def stated_keys(overrides: list[str]) -> dict[str, Any]:
    """The values that overrides state, by dotted key; a null states nothing, nor does the choice of a group."""
    stated: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if override.is_delete() or _chooses(override) or key.partition(".")[0] == "hydra":
            continue
        value = override.value()
        stated |= dict(_leaves({key: value.text if isinstance(value, QuotedString) else value}))
    return {key: value for key, value in stated.items() if value is not None}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves({str(k): v for k, v in value.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _chooses(override: Override) -> bool:
    return override.key_or_group in GROUPS or "/" in override.key_or_group


def _choices(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def fits(overrides: list[str]) -> None:
    """Compose and convert, whatever the values are.

    Raises:
        HydraException, OmegaConfBaseException, AttributeError: an override that does not fit the schema.
    """
    typed_and_problems(compose(overrides)[0])


def _without_misfits(overrides: list[str], error: Exception) -> tuple[list[str], list[str]]:
    """Hydra stops with `error` at the first override that does not fit; so they are tried in halves on the groups.

    Returns those that do fit (none where the groups themselves do not), and what is wrong with the others.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    groups = [override.input_line or "" for override in parsed if _chooses(override)]
    values = [override for override in parsed if not _chooses(override)]
    try:
        fits(groups)
    except MISFIT as groups_error:
        return [], [_explained(groups_error)]
    wrong = _misfits(groups, values, error)
    if not wrong:  # each fits alone, but not with another
        return [], [_explained(error)]
    fitting = [override.input_line or "" for override in values if override not in [misfit for misfit, _ in wrong]]
    said = [from_verl(misfit.key_or_group, (misfit.input_line or "").partition("=")[2]) for misfit, _ in wrong]
    return groups + fitting, [verl or _explained(why) for verl, (_, why) in zip(said, wrong, strict=True)]


def _misfits(groups: list[str], values: list[Override], error: Exception) -> list[tuple[Override, Exception]]:
    """Of `values`, which fail together with `error`, those that fail alone."""
    if len(values) == 1:
        return [(values[0], error)]
    found = []
    for half in (values[: len(values) // 2], values[len(values) // 2 :]):
        try:
            fits([*groups, *(override.input_line or "" for override in half)])
        except MISFIT as half_error:
            found += _misfits(groups, half, half_error)
    return found


def _explained(error: Exception) -> str:
    cause = f": {error.__cause__}" if "Error merging override" in str(error) else ""  # Hydra keeps it apart
    return explain_compose_error(f"{error}{cause}")
