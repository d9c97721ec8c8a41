"""The comparison with other systems: its materials, what it reads from their output, and its processes."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from benchmarks.peers import __main__ as driver
from benchmarks.peers import materials
from benchmarks.peers.cell import Cell, Lengths, mean_length, num_stop_ids, parse_lengths, stop_probability
from benchmarks.peers.process import MARK, MemoryPoll, end_family, family, run, turn
from benchmarks.peers.reward import compute_score, score_group
from benchmarks.peers.steps import Step, rlpost_steps, summary, trl_steps, verl_steps
from benchmarks.peers.systems import SYSTEMS, Rlpost, Trl, Verl
from benchmarks.peers.table import table
from rlpost.rewards.base import Answer
from rlpost.tasks.quickstart import character_tokenizer

VERL_LOG = """\
1000.000\t\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m Training Progress:   0%|          | 0/3 [00:00<?, ?it/s]
1040.500\t\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m step:1 - actor/pg_loss:-0.0012 - timing_s/gen:np.float64(20.5) - \
a/nan:nan - timing_s/old_log_prob:3.5 - timing_s/update_actor:10.0 - timing_s/update_weights:0.5 - n:np.int64(3) - \
response_length/mean:512.0 - timing_s/step:38.0 - training/rollout_probs_diff_mean:1.5e-07
1073.000\t\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m step:2 - actor/pg_loss:0.1 - timing_s/gen:18.0 - \
timing_s/step:32.0 - response_length/mean:500.0 - rollout_corr/kl:-0.0003
1074.000\tFinal validation metrics: None
"""
# what verl 0.9.1's own metric functions and console logger print
VERL_LINE = """\
5.000\t\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m step:1 - training/rollout_probs_diff_valid:1 - \
training/rollout_probs_diff_mean:0.006076442077755928 - rollout_corr/kl:0.0029846264515072107 - \
rollout_corr/k3_kl:6.604194641113281e-05 - rollout_corr/chi2_token:-0.005706191062927246 - \
response_length/mean:14.5 - response_length/max:16.0 - response_length_non_aborted/mean:14.5 - \
response/aborted_ratio:0.0 - timing_s/gen:18.123 - timing_s/old_log_prob:3.4 - timing_s/adv:0.1 - \
timing_s/update_actor:10.0 - timing_s/update_weights:0.5 - timing_s/step:32.0 - \
timing_per_token_ms/gen:312.4655172413793 - perf/total_num_tokens:96 - perf/mfu/actor:0.15 - actor/lr:1e-06 - \
training/num_turns/mean:np.float64(2.0) - training/global_step:1 - actor/pg_loss:np.float32(-1.5e-09)
"""


def cell(**changes: object) -> Cell:
    facts: dict[str, object] = {
        "model": "/m",
        "no_eos": "/m/no_eos",
        "prompts": "/m/prompts",
        "lengths": parse_lengths("fixed512"),
        "num_prompts": 64,
        "num_samples": 8,
        "steps": 5,
        "micro_tokens": 16_384,
    }
    return Cell(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE tokenizer with a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    return folder


def test_stop_probability_gives_the_mean_of_the_truncated_geometric() -> None:
    for mean, longest in ((1024, 4096), (3, 5), (100, 128)):
        p = stop_probability(mean, longest)
        by_hand = sum(n * p * (1 - p) ** (n - 1) for n in range(1, longest)) + longest * (1 - p) ** (longest - 1)
        assert math.isclose(by_hand, mean, rel_tol=1e-6)


def test_num_stop_ids_come_near_the_mean_asked_for() -> None:
    count = num_stop_ids(parse_lengths("longtail"), 151_936)
    assert abs(mean_length(count / 151_936, 4096) / 1024 - 1) < 0.01
    assert num_stop_ids(parse_lengths("fixed512"), 151_936) == 0


def test_parse_lengths_reads_both_kinds_and_refuses_others() -> None:
    assert parse_lengths("fixed16") == Lengths(name="fixed16", longest=16)
    short = parse_lengths("longtail:8:24")
    assert (short.mean, short.longest, short.fixed) == (8, 24, False)
    assert parse_lengths(short.text) == short
    for text in ("fixed", "uniform", "longtail:24:8"):
        with pytest.raises(ValueError, match=text):
            parse_lengths(text)


def test_make_model_extends_the_tokenizer_and_lists_what_ends_an_answer(source: Path, tmp_path: Path) -> None:
    lengths, folder = parse_lengths("longtail:8:24"), tmp_path / "model"
    materials.make_model("tiny", lengths, source, folder, vocabulary=1000)
    tokenizer, before = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    assert len(tokenizer) == 1000 == AutoConfig.from_pretrained(folder).vocab_size
    assert tokenizer("12+30 = 42")["input_ids"] == before("12+30 = 42")["input_ids"]
    assert tokenizer.decode([999]) == "<unused_999>"
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    assert len(stops) == num_stop_ids(lengths, 1000)
    assert tokenizer.eos_token_id in stops
    written = (folder / "MADE_BY").stat().st_mtime_ns
    materials.make_model("tiny", lengths, source, folder, vocabulary=1000)
    assert (folder / "MADE_BY").stat().st_mtime_ns == written


def test_make_model_of_fixed_lengths_names_no_end(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    materials.make_model("tiny", parse_lengths("fixed12"), source, folder, vocabulary=1000)
    assert GenerationConfig.from_pretrained(folder).eos_token_id is None
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    assert AutoTokenizer.from_pretrained(folder / "no_eos").eos_token_id is None
    assert len(AutoTokenizer.from_pretrained(folder / "no_eos")) == 1000


def test_adapt_checkpoint_adds_the_tokenizer_without_eos(source: Path, tmp_path: Path) -> None:
    materials.make_model("tiny", parse_lengths("fixed12"), source, tmp_path / "model", vocabulary=1000)
    materials.adapt_checkpoint(tmp_path / "model", tmp_path / "adapted")
    assert AutoTokenizer.from_pretrained(tmp_path / "adapted").eos_token_id is not None
    assert AutoTokenizer.from_pretrained(tmp_path / "adapted" / "no_eos").eos_token_id is None
    assert (tmp_path / "adapted" / "model.safetensors").is_symlink()


def test_prompts_are_the_same_in_both_files(tmp_path: Path) -> None:
    materials.write_prompts(tmp_path / "prompts", 5)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines == pyarrow.parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert len(lines) == 5


def test_verl_steps_reads_the_console_logger() -> None:
    first, second = verl_steps(VERL_LOG.splitlines(), num_sequences=10)
    assert (first.number, first.end_s, first.tokens) == (1, 1040.5, 5120.0)
    assert first.phases == {
        "generate": 20.5,
        "old_logprobs": 3.5,
        "update": 10.0,
        "weight_sync": 0.5,
        "reported_step": 38.0,
    }
    assert first.differences == {"training/rollout_probs_diff_mean": 1.5e-07}
    assert second.differences == {"rollout_corr/kl": -0.0003}


def test_verl_steps_tells_each_metric_from_its_namesakes() -> None:
    (step,) = verl_steps(VERL_LINE.splitlines(), num_sequences=4)
    assert (step.number, step.end_s, step.tokens) == (1, 5.0, 58.0)
    assert step.phases == {
        "generate": 18.123,
        "old_logprobs": 3.4,
        "update": 10.0,
        "weight_sync": 0.5,
        "reported_step": 32.0,
    }
    assert step.differences == {
        "training/rollout_probs_diff_mean": 0.006076442077755928,
        "rollout_corr/kl": 0.0029846264515072107,
        "rollout_corr/k3_kl": 6.604194641113281e-05,
    }


def test_trl_steps_reads_the_lines_of_its_script() -> None:
    row = {"step": 2, "end_s": 12.5, "phases": {"update": 3.0}, "completions/mean_length": 20.0}
    row["sampling/sampling_logp_difference/mean"] = 0.02
    steps = trl_steps(["1.0\tloading", f"12.6\tTRL_STEP {json.dumps(row)}"], num_sequences=4)
    assert steps == [
        Step(
            number=2,
            end_s=12.5,
            tokens=80.0,
            phases={"update": 3.0},
            differences={"sampling/sampling_logp_difference/mean": 0.02},
        )
    ]


def test_rlpost_steps_skips_validation() -> None:
    row = {"step": 1, "time_s": 5.0, "response_length/mean": 3.0, "timing_s/step": 2.0, "timing_s/generate": 1.0}
    steps = rlpost_steps([{"step": 0, "time_s": 1.0, "val/reward": 0.5}, row], num_sequences=8)
    assert [(s.number, s.tokens, s.phases) for s in steps] == [(1, 24.0, {"generate": 1.0, "reported_step": 2.0})]


def test_summary_counts_from_report_to_report() -> None:
    ends, tokens = (10.0, 14.0, 17.0, 22.0), (0, 0, 600, 1000)
    steps = [Step(number=i + 1, end_s=e, tokens=t) for i, (e, t) in enumerate(zip(ends, tokens, strict=True))]
    said = summary(steps, warmup=2)
    assert said["step_s_each"] == [3.0, 5.0]
    assert said["tokens_per_s"] == 1600 / 8
    with pytest.raises(ValueError, match="4 steps with 4 to warm up"):
        summary(steps, warmup=4)


@pytest.mark.parametrize("name", SYSTEMS)
def test_commands_say_the_same_of_the_cell(name: str, tmp_path: Path) -> None:
    system = SYSTEMS[name](cell(), ["seed=3"])
    for variant in system.variants:
        command = " ".join(system.command(variant, tmp_path))
        if name == "trl":
            command += (tmp_path / "request.json").read_text()
        assert "/m/prompts" in command
        assert "512" in command
        assert "seed=3" in command or '"seed": 3' in command


def test_only_fixed_lengths_ignore_the_eos(tmp_path: Path) -> None:
    for lengths, fixed in ((parse_lengths("fixed512"), True), (parse_lengths("longtail"), False)):
        this = cell(lengths=lengths)
        assert f"actor_rollout_ref.rollout.ignore_eos={fixed}" in Verl(this).command("fast", tmp_path)
        assert ("ignore_eos" in Trl(this).config("fast", tmp_path)["generation_kwargs"]) is fixed
        assert ("model.tokenizer_path=/m/no_eos" in Rlpost(this).command("fast", tmp_path)) is fixed


def test_trl_takes_as_many_padded_sequences_as_the_budget_holds() -> None:
    assert Trl(cell()).micro_sequences() == 32
    assert Trl(cell(lengths=parse_lengths("longtail"), micro_tokens=8192)).micro_sequences() == 2
    assert Trl(cell(micro_tokens=100)).micro_sequences() == 1


def test_trl_generates_and_updates_once_a_step(tmp_path: Path) -> None:
    for prompts, samples in ((64, 8), (3, 2), (5, 3)):
        for lengths in (parse_lengths("fixed512"), parse_lengths("longtail")):
            this = cell(num_prompts=prompts, num_samples=samples, lengths=lengths, micro_tokens=8192)
            config = Trl(this).config("fast", tmp_path)
            assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == prompts * samples


def test_engines_hold_the_longest_sequence_and_no_more(tmp_path: Path) -> None:
    this = cell(lengths=parse_lengths("longtail"))
    assert "actor_rollout_ref.rollout.max_model_len=4352" in Verl(this).command("fast", tmp_path)
    assert Trl(this).config("fast", tmp_path)["vllm_max_model_length"] == 4352


def test_both_forms_of_the_reward_agree() -> None:
    assert score_group(None, [Answer(text="12345678", token_ids=[1])]) == [compute_score(solution_str="12345678")]
    assert compute_score(solution_str="12345678") == 1 / 7


def test_run_stamps_lines_and_ends_all_that_was_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); print('ready')"
    script += "; import time; time.sleep(600)"
    log = tmp_path / "log.txt"
    seen: list[int] = []

    def ready() -> bool:
        if log.is_file() and "ready" in log.read_text():
            seen.extend(pid for pid in children("sleep") if pid not in seen)
            return bool(seen)
        return False

    outcome = run([sys.executable, "-c", script], {}, tmp_path, ready, timeout_s=60)
    assert outcome.ended == "done"
    assert abs(float(log.read_text().partition("\t")[0]) - time.time()) < 120
    assert not any(Path(f"/proc/{pid}").exists() and pid in children("sleep") for pid in seen)


def children(name: str) -> list[int]:
    """Living processes called `name` that carry a mark of `run`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text().strip() == name and MARK.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_memory_poll_keeps_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, said = tmp_path / "nvidia-smi", tmp_path / "said"
    lines = [
        "import time",
        "for n in (10, 30, 20): print(n, flush=True)",
        f"open({str(said)!r}, 'w')",
        "time.sleep(600)",
    ]
    tool.write_text("\n".join([f"#!{sys.executable}", *lines]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    poll = MemoryPoll("0")
    while not said.exists():
        time.sleep(0.05)
    poll.close()
    assert poll.peak_mib == 30


def test_memory_poll_without_the_tool_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    poll = MemoryPoll("0")
    poll.close()
    assert poll.peak_mib is None


def test_run_tells_a_failure_from_a_timeout(tmp_path: Path) -> None:
    failed = run([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path, lambda: False, timeout_s=60)
    assert failed.ended == "exit 3"
    hung = run(["sleep", "600"], {}, tmp_path, lambda: False, timeout_s=0.1)
    assert hung.ended == "timeout"


def test_family_counts_descendants_that_lost_the_mark() -> None:
    script = "import os, subprocess; subprocess.Popen(['sleep', '600'], env={}); print('x', flush=True)"
    script += "; import time; time.sleep(600)"
    env = {**os.environ, MARK: "test-family"}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert len(family("test-family")) == 2
    end_family("test-family")
    process.wait()
    process.stdout.close()
    assert family("test-family") == set()


def test_rows_are_merged_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"variant": "fast", "ended": "done", "device": "H200", "versions": {"torch": "2"}, "command": ["x"]}
    figures = {"step_s": 2.0, "step_s_each": [2.0], "tokens_per_step": 100.0, "phases_s": {"update": 1.0}}
    figures |= {"first_step_after_s": 9.0, "peak_memory_mib": 1000, "differences": {"kl": 0.1}}
    out = tmp_path / "out.json"
    driver.save(out, {}, {"system": "verl", **base, **figures, "tokens_per_s": 50.0})
    driver.save(out, {}, {"system": "trl", **base, "ended": "exit 1"})
    driver.save(out, {}, {"system": "rlpost", **base, **figures, "tokens_per_s": 125.0})
    driver.save(out, {}, {"system": "trl", **base, **figures, "tokens_per_s": 100.0})
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["verl", "rlpost", "trl"]
    text = out.with_suffix(".md").read_text()
    assert text.strip() == table(rows, {}).strip()
    assert "| verl (fast) | done | 2 | 2.0 | 100 | 50 | 2.5 |" in text
    assert "exit 1" not in text
    assert capsys.readouterr().out


def test_row_without_figures_replaces_none_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"system": "trl", "variant": "fast", "device": "H200", "versions": {}, "command": ["x"]}
    figures = {"step_s": 2.0, "step_s_each": [2.0], "tokens_per_step": 100.0, "tokens_per_s": 50.0, "phases_s": {}}
    figures |= {"first_step_after_s": 9.0, "peak_memory_mib": None, "differences": {}}
    out = tmp_path / "out.json"
    for row in ({"ended": "exit 1"}, {"ended": "done", **figures}, {"ended": "timeout"}):
        driver.save(out, {}, base | row)
    assert [row["ended"] for row in json.loads(out.read_text())["rows"]] == ["done"]
    assert capsys.readouterr().out


def test_turns_of_one_name_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = "from benchmarks.peers.process import turn\nprint('ready', flush=True)\nwith turn('one'): print('in')"
    with turn("one"), turn("another"):
        env = {**os.environ, "PYTHONPATH": str(driver.ROOT)}
        second = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=1)
    assert second.communicate(timeout=60)[0] == "in\n"


def test_system_env_puts_its_own_packages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = driver.system_env("verl", {"verl": "/a:/b"})
    assert env["PYTHONPATH"] == f"/a:/b:{driver.ROOT}"
    assert driver.system_env("rlpost", {})["PYTHONPATH"] == f"/elsewhere:{driver.ROOT}"


def test_driver_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    script = "import signal, sys; from pathlib import Path; from benchmarks.peers import __main__ as driver, process\n"
    script += "driver.end_on_sigterm()\n"
    script += f"process.run(['sleep', '600'], {{}}, Path({str(tmp_path)!r}), lambda: False, 600)"
    env = {**os.environ, "PYTHONPATH": str(driver.ROOT)}
    running = subprocess.Popen([sys.executable, "-c", script], env=env)
    while not (sleeping := [pid for pid in children("sleep") if parent(pid) == running.pid]):
        time.sleep(0.1)
    running.terminate()
    assert running.wait(timeout=60) == 143
    assert sleeping[0] not in children("sleep")


def parent(pid: int) -> int:
    """Of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
