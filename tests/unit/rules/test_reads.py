"""The table of who reads which key, held against code that runs on configs which note what is read of them."""

import ast
import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from unittest.mock import Mock

from rlpost.aiter import FAMILIES
from rlpost.algos.advantages import ESTIMATORS
from rlpost.algos.aggregate import AGGREGATIONS
from rlpost.algos.config import AGGREGATIONS_READ, ESTIMATORS_READ, LOSSES_READ
from rlpost.algos.losses import POLICY_LOSSES
from rlpost.config import all_keys, keys_of_variants, register, typed_and_problems
from rlpost.data import PromptStream
from rlpost.data_adapters import ADAPTERS, get_adapter
from rlpost.data_config import ADAPTERS_READ, DataConfig
from rlpost.overrides import compose
from rlpost.rules.cross import ENGINES
from rlpost.rules.reads import READERS, readers_of, unread
from rlpost.tracking.tracking import Tracking
from rlpost.trainer import build
from rlpost.trainer.config import TimeoutsConfig
from rlpost.trainer.sources import pools
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout import sglang, vllm
from rlpost.workers.rollout.base import ENGINES as REGISTERED_ENGINES
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.hf import HFEngine
from tests import tiny
from tests.unit.rules.watched import watch


def composed(*overrides):
    register()
    return typed_and_problems(compose(list(overrides))[0])[0]


def known():
    return [*all_keys(), *keys_of_variants()]


def claimed(cfg, section):
    """Keys of a section that have a rule, as those said to be read and those said not to be."""
    keys = [key for key in known() if key.startswith(f"{section}.") and readers_of(key)]
    dead = set(unread(cfg, dict.fromkeys(keys, "set")))
    return set(keys) - dead, dead


# --- the table itself ---


def test_names_in_the_tables_are_those_registered():
    assert set(ESTIMATORS_READ) == set(ESTIMATORS.names())
    assert set(LOSSES_READ) == set(POLICY_LOSSES.names())
    assert set(AGGREGATIONS_READ) == set(AGGREGATIONS.names())
    assert set(ADAPTERS_READ) == {"auto", *ADAPTERS.names()}
    assert set(ENGINES) == set(REGISTERED_ENGINES.names())


def test_patterns_and_deciding_keys_exist():
    keys = known()
    for reader in READERS:
        for pattern in reader.keys:
            assert any(reader.matches(key) for key in keys if key.startswith(pattern.removesuffix(".*"))), pattern
        assert all(key in keys for key in reader.decided_by), reader.decided_by


BASES = (
    [],
    ["algo=ppo"],
    ["algo=dapo"],
    ["algo=rloo"],
    ["algo=sapo"],
    ["algo=reinforce_plus_plus"],
    ["rollout=hf"],
    ["rollout.aiter=off"],
    ["rollout.aiter_on_fault=stop"],
    ["model.lora_rank=4"],
    ["data.adapter=rows"],
    ["data.shuffle=false"],
    ["data.val_files=null"],
    ["reward.terms.accuracy.fn=my.own"],
    ["trainer.total_training_steps=3"],
    ["trainer=fully_async"],
    ["trainer=fully_async", "trainer.share_gpus=true"],
)


def test_the_advice_of_every_rule_makes_its_keys_read():
    configs = [(base, composed(*base)) for base in BASES]
    for reader in READERS:
        of_a_choice = reader.keys[0] in keys_of_variants()  # of trainer=fully_async
        able = [(base, cfg) for base, cfg in configs if not of_a_choice or "trainer=fully_async" in base]
        base = next((base for base, cfg in able if not reader.when(cfg)), None)
        assert base is not None, f"nothing here leaves {reader.keys} unread"
        advice = [part for part in re.split(r" or (?=\S+=)", reader.fix.removeprefix("set ")) if "=" in part]
        if advice and reader.keys != ("algo.name",):
            words = [word for word in advice[0].split() if "=" in word]
            assert reader.when(composed(*base, *words)), f"{words} does not help {reader.keys}"


CHECKS = ("__post_init__", "check", "_check_kl")  # functions of config modules that read a value only to refuse it


def reads(tree):
    """Names of the attributes that a module reads, outside the checks of its own config."""
    if isinstance(tree, ast.FunctionDef) and tree.name in CHECKS:
        return set()
    found = {tree.attr} if isinstance(tree, ast.Attribute) and isinstance(tree.ctx, ast.Load) else set()
    return found.union(*(reads(child) for child in ast.iter_child_nodes(tree)))


def test_every_key_is_read_somewhere():
    modules = [p for p in (tiny.ROOT / "rlpost").rglob("*.py") if not {"rules", "tools"} & set(p.parts)]
    read = set().union(*(reads(ast.parse(path.read_text())) for path in modules))
    unused = {key for key in known() if key.rpartition(".")[2] not in read}
    by_name = {f"rollout.aiter_kernels.{family}" for family in FAMILIES}  # `AiterKernelsConfig.set_to`
    by_name |= {f"trainer.timeouts.{key}" for key in TimeoutsConfig.__slots__}  # `TimeoutsConfig.by_phase`
    stated = {"trainer.require_batches", "actor.strategy", "critic.strategy"}  # refused where they do not hold
    assert unused <= by_name | stated


# --- components, on configs that note what is read ---


def test_adapters_read_what_the_table_says_and_nothing_else():
    rows = {
        "rows": {"prompt": "1", "ground_truth": "2"},
        "verl": {"prompt": "1", "reward_model": {"ground_truth": "2"}},
        "gsm8k": {"question": "1", "answer": "#### 2"},
        "math": {"problem": "1", "answer": "2"},
        "plain": {"prompt": "1", "answer": "2"},
        "chat": {"prompt": "1", "answer": "2"},
    }
    for name, row in rows.items():
        cfg = composed()
        cfg.data = DataConfig(train_files="unused", adapter=name)
        live, dead = claimed(cfg, "data")
        keys = {f"data.{key}" for key in ADAPTERS_READ["auto"]}
        seen = watch(cfg.data, "data.")
        get_adapter(cfg.data)(row, cfg.data)
        assert seen & keys == live & keys and seen.isdisjoint(dead), name


def test_roles_that_the_algorithm_does_not_need_get_no_section(monkeypatch):
    given = {}

    def start(*args, **sections):
        given.update(sections)
        return Mock()

    monkeypatch.setattr(build.WorkerGroup, "start", start)
    for overrides in (["algo=grpo"], ["algo=ppo"], ["algo=dapo"], ["algo=ppo", "algo.use_kl_loss=true"]):
        cfg = composed(*overrides)
        facts = build.Facts(model=None, tokenizer=None, spec=None)
        build.build_workers(cfg, facts, None, 1, AsyncExitStack())
        for role in ("critic", "ref"):
            assert (given[role] is None) == (f"{role}.path" in unread(cfg, {f"{role}.path": "m"})), overrides


def test_engines_read_what_the_table_says():
    model = ModelInfo(
        path="m", tokenizer_path="m", vocab_size=9, embedding_size=9, stop_token_ids=(1,), max_position_embeddings=64
    )
    for engine, arguments in (("vllm", vllm.engine_arguments), ("sglang", sglang.engine_arguments)):
        cfg = composed(f"rollout={engine}", "rollout.max_num_batched_tokens=512")
        seen = watch(cfg.rollout, "rollout.")
        arguments(cfg.rollout, model, 64, {"model"})
        assert {"rollout.enforce_eager", "rollout.max_num_batched_tokens", "rollout.max_num_seqs"} <= seen


def test_the_hf_engine_reads_none_of_what_the_table_denies_it(tmp_path):
    cfg = composed("rollout=hf")
    _, dead = claimed(cfg, "rollout")
    seen = watch(cfg.rollout, "rollout.")
    engine = HFEngine(cfg.rollout, tiny.model_info(tiny.write_qwen3(tmp_path)), 16)

    async def answer():
        await engine.start()
        await engine.generate([3, 4], SamplingSpec(temperature=1.0, max_tokens=2, vocab_size=32), 0, "r")
        await engine.shutdown()

    asyncio.run(answer())
    assert {"rollout.enforce_eager", "rollout.max_num_seqs", "rollout.aiter_on_fault"} <= dead
    assert seen and seen.isdisjoint(dead)


def test_pools_that_are_shared_have_no_size():
    for shared in ("false", "true"):
        cfg = composed("trainer=fully_async", f"trainer.share_gpus={shared}")
        sizes = {"trainer.rollout_gpus", "trainer.train_gpus"}
        seen = watch(cfg.trainer, "trainer.")
        pools(cfg)
        assert seen & sizes == sizes - set(unread(cfg, dict.fromkeys(sizes, 1)))


def test_trackers_without_a_project_do_not_read_its_name(tmp_path):
    cfg = composed("tracking=console")
    _, dead = claimed(cfg, "tracking")
    seen = watch(cfg.tracking, "tracking.")
    Tracking.build(cfg.tracking, tmp_path, {}, 1).close()
    assert "tracking.project_name" in dead and "tracking.logger" in seen and seen.isdisjoint(dead)


def test_a_seed_orders_nothing_that_is_not_shuffled():
    class Tokenizer:
        def __call__(self, texts, **_):
            return {"input_ids": [[1] for _ in texts]}

    def order(**changes):
        data = composed("data.train_files='task://rlpost.tasks.addition.problems?digits=1&size=9'").data
        stream = PromptStream(replace(data, **changes), Tokenizer(), 1)
        return [prompt.text for prompt in stream.next(9)]

    assert order(seed=1) != order(seed=2)
    assert order(seed=1, shuffle=False) == order(seed=2, shuffle=False)
