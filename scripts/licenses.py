"""The licences of all that the locks pin, as packages state them: `python scripts/licenses.py .venv .venv-sglang`.

Prints docs/licenses.md; the environments are those that `scripts/setup_env.sh` made for `cpu` and for `sglang`.
"""

import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
KINDS = ("cpu", "sglang")
HEAD = """# Licences of the dependencies

What `requirements/*.txt` pin, and torch, with the licence that each package states of itself; its own files have the
last word. rlpost's own is Apache-2.0. Written by `make licenses`.

| package | version | licence | environment |
|---|---|---|---|"""


def locked(kind: str) -> list[Requirement]:
    """What the locks of an environment pin."""
    texts = [(ROOT / "requirements" / f"{kind}{part}.txt").read_text() for part in ("", ".engine")]
    lines = "".join(texts).replace("\\\n", "").splitlines()
    return [Requirement(re.split(r"\s+--hash=", line)[0]) for line in lines]


def licence(package: Distribution) -> str:
    """In the words of the package: an expression, a short name, or what its classifiers say."""
    metadata = package.metadata
    stated = [metadata.get("License-Expression"), metadata.get("License")]
    for text in stated:
        if text and len(text) < 120 and "\n" not in text.strip() and text.strip().upper() != "UNKNOWN":
            return text.strip()
    classified = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    return ", ".join(classified) or (stated[1] or "not stated").strip().partition("\n")[0].strip()


def main(environments: list[str]) -> None:
    """Print the page."""
    rows: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for kind, environment in zip(KINDS, environments, strict=True):
        (site,) = Path(environment).glob("lib/python3*/site-packages")
        installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions(path=[str(site)])}
        pinned = [(canonicalize_name(r.name), next(iter(r.specifier)).version, r.marker) for r in locked(kind)]
        for name, version, marker in [*pinned, ("torch", installed["torch"].version, None)]:
            known = licence(installed[name]) if name in installed else f"not installed here: only where {marker}"
            rows.setdefault((name, version), (known, []))[1].append(kind)
    print(HEAD)
    for (name, version), (known, kinds) in sorted(rows.items()):
        print(f"| {name} | {version} | {known.replace('|', '/')} | {', '.join(kinds)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
