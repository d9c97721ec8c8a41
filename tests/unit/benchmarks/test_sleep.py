"""The benchmark of sleep: what its columns mean, the order of a round, and all of it on an engine that is there."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import sleep
from benchmarks.sleep import Checkpoint, Measurement, Round, summary
from rlpost.tasks.quickstart import character_tokenizer
from rlpost.trajectory import Status
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.hf import HFEngine
from tests.tiny import model_info, write_qwen3

GIB = 2**30


def a_round(**changes: object) -> Round:
    facts: dict[str, object] = {
        "awake": 10 * GIB,
        "asleep": GIB,
        "with_weights": 3 * GIB,
        "woken": 9 * GIB,
        "sleep_s": 2.0,
        "weights_s": 0.5,
        "kv_cache_s": 0.25,
        "warm_s": 0.1,
        "first_s": 0.2,
        "same_tokens": True,
    }
    return Round(**(facts | changes))  # type: ignore[arg-type]


def test_summary_is_of_medians() -> None:
    rounds = [a_round(), a_round(sleep_s=3.0, awake=11 * GIB), a_round(sleep_s=1.0, awake=9 * GIB)]
    assert summary(1, rounds) == {
        "level": 1,
        "awake_gib": 10.0,
        "asleep_gib": 1.0,
        "weights_gib": 2.0,
        "kv_cache_gib": 6.0,
        "sleep_gb_per_s": round(9 * GIB / 1e9 / 2, 4),
        "wake_gb_per_s": round(8 * GIB / 1e9 / 0.75, 4),
        "sleep_s": 2.0,
        "wake_weights_s": 0.5,
        "wake_kv_cache_s": 0.25,
        "first_s": 0.2,
        "warm_s": 0.1,
        "same_tokens": True,
    }


def test_summary_says_when_tokens_differed_once_and_nothing_of_memory_without_any() -> None:
    none = {"awake": 0, "asleep": 0, "with_weights": 0, "woken": 0}
    row = summary(1, [a_round(**none), a_round(**none, same_tokens=False)])
    assert row["same_tokens"] is False
    assert not any("gib" in name or "gb_per_s" in name for name in row)


class Sleeper:
    """An engine with 5 bytes of weights and 20 of cache, besides 2 that never go; keeps a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.parts = {"weights": 5, "kv_cache": 20, "rest": 2}
        self.held = set(self.parts)
        self.intact = True

    async def sleep(self, level: int = 1) -> None:
        self.log.append(f"sleep {level}")
        self.held = {"rest"}
        self.intact = level == 1

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self.log.append(f"wake {' '.join(tags)}")
        self.held.update(tags)

    async def decode(self) -> float:
        self.log.append("decode")
        return float(len(self.log))

    async def tokens(self) -> list[list[int]]:
        self.log.append("tokens")
        return [[1, 2] if self.intact else [0, 0]]

    async def reload(self) -> None:
        self.log.append("reload")
        self.parts["rest"], self.intact = 3, True

    def held_bytes(self) -> int:
        return sum(self.parts[name] for name in self.held)


def measurement(engine: Sleeper) -> Measurement:
    return Measurement(
        engine=engine,  # type: ignore[arg-type]
        decode=engine.decode,
        tokens=engine.tokens,
        reload=engine.reload,
        held_bytes=engine.held_bytes,
    )


@pytest.mark.parametrize("level", [1, 2])
def test_round_sleeps_and_wakes_in_parts_between_two_calls(level: int) -> None:
    engine = Sleeper()
    result = asyncio.run(measurement(engine).round(level, [[1, 2]]))
    reload = ["reload"] if level == 2 else []
    order = ["decode", f"sleep {level}", "wake weights", *reload, "wake kv_cache", "decode", "tokens"]
    assert engine.log == order
    assert (result.awake, result.asleep, result.with_weights, result.woken) == (27, 2, 7, 27)
    assert (result.warm_s, result.first_s) == (1.0, float(len(order) - 1))
    assert result.same_tokens


def test_round_notices_other_tokens() -> None:
    assert not asyncio.run(measurement(Sleeper()).round(1, [[1, 3]])).same_tokens


def test_rounds_leave_the_first_out() -> None:
    engine = Sleeper()
    assert len(asyncio.run(measurement(engine).rounds(1, [[1, 2]], 3))) == 3
    assert engine.log.count("sleep 1") == 4


def test_checkpoint_brings_back_the_weights_that_the_engine_started_with(tmp_path: Path) -> None:
    info = model_info(write_qwen3(tmp_path))
    engine = HFEngine(RolloutConfig(name="hf"), info, max_model_len=16)
    spec = SamplingSpec(temperature=0.0, max_tokens=6, vocab_size=info.vocab_size)

    async def answer() -> list[int]:
        (completion,) = await engine.generate([3, 4, 5], spec, None, "a")
        assert completion.status is Status.LENGTH
        return completion.token_ids.tolist()

    async def body() -> None:
        await engine.start()
        before = await answer()
        for parameter in engine._model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        assert await answer() != before
        checkpoint = Checkpoint(info.path)
        for _ in range(2):
            await checkpoint.load(engine)
            assert await answer() == before
        await engine.shutdown()

    asyncio.run(body())


def test_hf_engine_is_measured_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = character_tokenizer()
    model = write_qwen3(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    arguments = ["--engine", "hf", "--model", str(model), "--level", "2", "1", "--out", str(tmp_path / "out")]
    sizes = ["--prompts", "2", "--prompt-tokens", "5", "--max-tokens", "4", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["sleep", *arguments, *sizes, "--cache", str(tmp_path / "cache")])
    sleep.main()
    kept = json.loads((tmp_path / "out/sleep-hf-model.json").read_text())
    assert [(row["level"], row["same_tokens"]) for row in kept["rows"]] == [(1, True), (2, True)]
    assert "medians of 2 rounds" in kept["notes"]
    printed = capsys.readouterr().out
    assert printed.count("ROW ") == 2
    assert (tmp_path / "out/sleep-hf-model.md").read_text() in printed


def test_other_paths_than_the_engines_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sleep", "--variant", "pool"])
    with pytest.raises(SystemExit):
        sleep.parse_args()
    assert "--variant pool" in capsys.readouterr().err
