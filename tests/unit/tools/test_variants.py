"""Narrowing the cause of a disagreement, on runs that are played."""

import asyncio

import pytest
import torch

from rlpost.algos.config import AlgoConfig
from rlpost.config import Config
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.tools.agreement import LOADED, STALE, SYNCED, SYNCED_AGAIN, WOKEN, Stage, histogram
from rlpost.tools.variants import VARIANTS, Variant, changed, conclude, narrow, needs_trials, suspects
from rlpost.trainer.parity import Parity
from rlpost.workers.config import RolloutConfig


def config(**rollout) -> Config:
    return Config(
        algo=AlgoConfig(adv_estimator="reinforce_plus_plus"),
        reward=RewardConfig(terms={"length": RewardTermConfig(fn="length")}),
        rollout=RolloutConfig(**({"name": "vllm", "dtype": "bfloat16"} | rollout)),
    )


def stage(name=LOADED, mean=1e-6, cause="", limit=1e-3, proven=False) -> Stage:
    return Stage(
        name=name,
        parity=Parity(mean=mean, p99=mean, max=mean, signed_mean=mean, num_tokens=10),
        histogram=[10],
        limit=limit,
        expected=name != STALE,
        cause=cause,
        proven=proven,
    )


def healthy() -> list[Stage]:
    return [stage(LOADED), stage(SYNCED), stage(WOKEN), stage(STALE, 0.3, "stale weights: x"), stage(SYNCED_AGAIN)]


def sick(cause="precision: small") -> list[Stage]:
    return [stage(LOADED, 0.1, cause), *healthy()[1:]]


def run_narrow(cfg, variants, is_cured):
    asked = []

    async def run(cfg):
        asked.append(cfg)
        return healthy() if is_cured(cfg) else sick()

    return asyncio.run(narrow(cfg, variants, run)), asked


def test_changes_reach_fields_and_dictionaries_of_a_copy():
    cfg = config()
    other = changed(cfg, {"rollout.engine_kwargs.enable_prefix_caching": False, "actor.dtype": "float32"})
    assert other.rollout.engine_kwargs == {"enable_prefix_caching": False} and other.actor.dtype == "float32"
    assert cfg.rollout.engine_kwargs == {} and cfg.actor.dtype == "auto"


@pytest.mark.parametrize(
    ("engine", "kind", "expected"),
    [
        ("hf", "cpu", ["precision"]),
        ("vllm", "cpu", ["prefix cache", "precision"]),
        (
            "sglang",
            "rocm",
            [
                "prefix cache",
                "AITER",
                "captured graphs",
                "attention of the trainer",
                "compilation of the trainer",
                "precision",
            ],
        ),
        (
            "vllm",
            "cuda",
            [
                "prefix cache",
                "captured graphs",
                "attention of the engine",
                "attention of the trainer",
                "compilation of the trainer",
                "precision",
            ],
        ),
    ],
)
def test_suspects_are_those_of_the_engine_and_the_platform(engine, kind, expected):
    names = [variant.name for variant in suspects(config(name=engine), kind)]
    assert len(names) == len(expected) and all(n.startswith(e) for n, e in zip(names, expected, strict=True))


def test_what_would_change_nothing_is_no_suspect():
    cfg = changed(config(temperature=0.7, enforce_eager=True), {"rollout.dtype": "float32", "actor.dtype": "float32"})
    names = [variant.name for variant in suspects(cfg, "cuda")]
    assert names == [
        "sampling settings",
        "prefix cache",
        "attention of the engine",
        "attention of the trainer",
        "compilation of the trainer",
    ]


def test_every_variant_names_keys_that_exist():
    cfg = config()
    for variant in [*VARIANTS, *(part for whole in VARIANTS for part in whole.parts)]:
        assert (changed(cfg, variant.changes) == cfg) == (variant.name == "sampling settings")  # which are the default


def test_narrowing_stops_at_the_first_variant_that_agrees():
    cfg = config()
    variants = suspects(cfg, "cuda")
    trials, asked = run_narrow(cfg, variants, lambda cfg: cfg.rollout.enforce_eager)
    assert [t.variant.name for t in trials] == [v.name for v in variants[:2]] and len(asked) == 2
    assert [t.agrees for t in trials] == [False, True]
    assert conclude(sick(), trials).startswith(
        "captured graphs and compilation of the engine: with rollout.enforce_eager"
    )


def test_narrowing_goes_into_the_parts_of_what_agrees():
    def cured(cfg):
        return cfg.rollout.aiter == "off" or cfg.rollout.aiter_kernels.rope == "off"

    trials, _ = run_narrow(config(), suspects(config(), "rocm"), cured)
    assert [t.variant.name for t in trials if t.agrees] == ["AITER", "AITER rope"]
    assert conclude(sick(), trials).startswith("AITER rope: with rollout.aiter_kernels.rope=off")
    trials, _ = run_narrow(config(), suspects(config(), "rocm"), lambda cfg: cfg.rollout.aiter == "off")
    assert conclude(sick(), trials).startswith("AITER: with rollout.aiter=off")


def test_a_variant_that_does_not_run_is_noted_and_the_next_is_tried():
    async def run(cfg):
        if "bad" in cfg.rollout.engine_kwargs:
            raise RuntimeError("no such backend")
        return healthy()

    variants = [Variant(name="a", changes={"rollout.engine_kwargs.bad": 1}), Variant(name="b", changes={})]
    trials = asyncio.run(narrow(config(), variants, run))
    assert trials[0].error == "RuntimeError: no such backend" and not trials[0].agrees and trials[1].agrees


def test_no_variant_is_tried_where_the_gate_has_proved_the_cause():
    assert not needs_trials(healthy())
    assert needs_trials(sick())
    assert not needs_trials([stage(LOADED, 0.1, "sampling settings: x", proven=True), *healthy()[1:]])
    unnoticed = [stage(name, 1e-6) for name in (LOADED, SYNCED, WOKEN, STALE, SYNCED_AGAIN)]
    assert not needs_trials(unnoticed)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (LOADED, "loaded other weights"),
        (SYNCED, "the weight sync"),
        (WOKEN, "sleep"),
        (SYNCED_AGAIN, "do not all reach"),
    ],
)
def test_stale_weights_are_blamed_on_what_came_before(name, part):
    stages = healthy()
    at = [s.name for s in stages].index(name)
    stages[at] = stage(name, 0.4, "stale weights: after pushing the weights again it is 1e-07")
    assert part in conclude(stages, [])


def test_conclusion_without_a_cure_is_the_gates_own():
    assert conclude(healthy(), []) == ""
    assert conclude(sick("precision: small and without direction"), []) == "precision: small and without direction"


def test_a_planted_change_that_goes_unnoticed_is_a_failure():
    stages = healthy()
    stages[3] = stage(STALE, 1e-5)
    assert not stages[3].passed
    assert "went unnoticed" in conclude(stages, []) and "trainer.parity_probe_size" in conclude(stages, [])


def test_histogram_counts_every_token_once_and_what_is_no_number_as_large():
    values = torch.tensor([0.0, 1e-7, 2e-7, -0.05, 0.5, 3.0, torch.nan, -torch.inf], dtype=torch.float64)
    assert histogram(values) == [2, 1, 0, 0, 0, 0, 1, 1, 3]
