"""Whether an inference engine is here and offers what its adapter calls: it is asked, there is no table of versions."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class Package:
    """How an engine is installed.

    Attributes:
        module: what the adapter imports.
        title: what messages call it.
        install: the command that installs a version which fits.
    """

    module: str
    title: str
    install: str


PACKAGES = {
    "vllm": Package(
        module="vllm", title="vLLM", install="pip install 'rlpost[vllm]' (rlpost[cpu] on a machine without a GPU)"
    ),
    "sglang": Package(module="sglang", title="SGLang", install="pip install 'rlpost[sglang]'"),
}


def require_installed(engine: str) -> None:
    """Find out before anything starts that the engine is not there. Imports nothing.

    Raises:
        ValueError: names the extra that brings it.
    """
    package = PACKAGES.get(engine)
    if package is not None and importlib.util.find_spec(package.module) is None:
        raise ValueError(
            f"rollout={engine}: {package.title} is not installed: {package.install}, one engine an environment; "
            "rollout=hf needs none, but is slow"
        )


def require_offered(engine: str, names: Iterable[str]) -> None:
    """Find out before the engine starts that this version lacks something the adapter calls. Imports it.

    Args:
        names: `package.module:Class.attribute`.

    Raises:
        ValueError: lists what is missing.
    """
    missing = [name for name in names if not _is_there(name)]
    if missing:
        package = PACKAGES[engine]
        version = getattr(importlib.import_module(package.module), "__version__", "of unknown version")
        raise ValueError(
            f"rollout={engine}: {package.title} {version} lacks {', '.join(missing)}, which rlpost calls. "
            f"Install one that has it: {package.install}"
        )


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
