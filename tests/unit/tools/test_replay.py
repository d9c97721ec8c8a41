"""Replay of steps of a tiny model: what is planted is named where it first shows; a healthy step comes out the same."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpost.algos.config import AlgoConfig
from rlpost.batch import Batch
from rlpost.config import Config
from rlpost.data_config import DataConfig
from rlpost.metrics import scalars
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.tools import replay
from rlpost.tools.replays.compare import WHOLE, compare
from rlpost.tools.replays.rerun import GRADIENTS, RESULT, Changes, rerun, train
from rlpost.trainer.nonfinite import Fault
from rlpost.trainer.replay import Bundle, ReplayStore, describe
from rlpost.trajectory import NOT_ASKED, Provenance
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RolloutConfig
from rlpost.workers.dispatch import TrainWork, on_policy_rows, plan_train
from rlpost.workers.model_worker import ModelWorker
from tests import tiny

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny.write_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, initializer_range=0.1)


def config(model: Path, **algo) -> Config:
    role = {"ppo_mini_batch_size": 2, "grad_clip": 0.01, "dtype": "float32", "optim": OptimConfig(lr=1e-2, eps=1e-2)}
    return Config(
        algo=AlgoConfig(**({"adv_estimator": "gae"} | algo)),
        model=ModelConfig(path=str(model)),
        actor=ActorConfig(**role),
        critic=CriticConfig(**role),
        rollout=RolloutConfig(name="hf", n=2),
        reward=RewardConfig(terms={"length": RewardTermConfig(fn="length", kwargs={"max_length": 24})}),
        data=DataConfig(train_batch_size=4, max_prompt_length=8, max_response_length=24),
    )


def step_batch() -> Batch:
    """Four groups of two sequences, each column made up."""
    lengths = torch.tensor([9, 21, 4, 13, 5, 17, 30, 6])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total, generator = int(lengths.sum()), torch.Generator().manual_seed(3)
    mask = torch.arange(total) - cu_seqlens[:-1].repeat_interleave(lengths) >= 3
    made = {name: 0.1 * torch.randn(total, generator=generator) for name in ("advantages", "returns", "values")}
    return Batch(
        cu_seqlens,
        made
        | {
            "token_ids": torch.randint(2, 32, (total,), generator=generator),
            "provenance": torch.where(mask, int(Provenance.MODEL), int(Provenance.TEMPLATE)),
            "response_mask": mask,
            "rollout_logprobs": torch.where(mask, -3.0, 0.0),
            "old_logprobs": torch.where(mask, -3.0, 0.0),
            "group": torch.arange(8) // 2,
            "sample_id": torch.arange(8) % 2,
        },
    )


class Keeper:
    """Makes bundles: `change(worker)` before their weights are saved."""

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder

    def bundle(self, change=None, batch=None, roles=("actor",), fault=None, trains=False, **algo) -> Bundle:
        about = describe(config(self.model, **algo), tiny.model_info(self.model), {"actor": 8, "critic": 8})
        store = ReplayStore(self.folder, json.loads(json.dumps(about)))
        batch = step_batch() if batch is None else batch
        draft = Bundle(self.folder, {"roles": roles, **about})
        worker = ModelWorker(0, 1)
        worker.connect(f"file://{self.folder}/store", 60.0)
        try:
            setup = draft.setup()
            setup.ref = None
            worker.build(setup)
            if change is not None:
                change({name: p for name, p in worker.engines[roles[0]].model.model.named_parameters()})

            async def save(folder: Path) -> None:
                worker.save(folder)

            asyncio.run(store.begin("step_7", save))
            metrics = {}
            for role in roles if trains else ():
                metrics |= scalars(worker.train(role, self.work(worker, role, draft, batch), draft.algorithm()))
        finally:
            worker.shutdown()
            (self.folder / "store").unlink()
        return Bundle.read(store.finish("step_7", 7, batch, roles, metrics, fault))

    def work(self, worker, role, draft, batch) -> TrainWork:
        """One rank's, in micro-batches of its own size: the result does not depend on it."""
        algorithm = draft.algorithm()
        (work,) = plan_train(
            batch,
            worker.setup.role_config(role),
            lambda mask, cu_seqlens: algorithm.loss_weights(role, mask, cu_seqlens),
            dp_size=1,
            max_tokens=40,
            key="",
            seed=0,
        )
        return work

    def rerun(self, bundle: Bundle, changes=None) -> tuple[list[tuple[str, str]], dict[str, float], dict]:
        """(where, name) of what was found, metrics, gradients."""
        rerun(bundle, changes or Changes(), self.folder)
        result = json.loads((self.folder / RESULT).read_text())
        found = [(finding["where"], finding["name"]) for finding in result["findings"]]
        return found, result["metrics"], load_file(self.folder / GRADIENTS)


@pytest.fixture
def keeper(model, tmp_path) -> Keeper:
    return Keeper(model, tmp_path)


@torch.no_grad()
def poison(parameters) -> None:
    parameters[f"{UP}.weight"].to_local()[5, 7] = math.nan


@torch.no_grad()
def inflate(parameters) -> None:
    parameters[f"{UP}.weight"].to_local().mul_(1e38)


FAULTY = Fault(what="the loss is not finite", role="actor", update=1)


def test_weight_that_is_not_a_number_is_named_and_the_module_that_multiplies_by_it(keeper):
    found, metrics, _ = keeper.rerun(keeper.bundle(poison, fault=FAULTY))
    assert found[:2] == [("weight", f"{UP}.weight"), ("forward", UP)]
    assert metrics["actor/skipped_updates"] == 1


def test_module_whose_output_overflows_is_named_with_a_token(keeper):
    bundle = keeper.bundle(inflate, fault=FAULTY)
    found, _, _ = keeper.rerun(bundle)
    assert found[0][0] == "forward" and found[0][1].startswith("model.layers.1.mlp")
    first = json.loads((keeper.folder / RESULT).read_text())["findings"][0]
    assert "first at token" in first["what"] and "of sample" in first["what"]
    assert ("loss", "the loss") in found


def test_loss_with_an_infinite_slope_is_found_at_the_logprobs_and_in_the_head_first(keeper):
    found, _, _ = keeper.rerun(keeper.bundle(fault=FAULTY, loss_mode="tests.e2e.losses.steep"))
    assert found[0] == ("backward", "logprobs")
    assert next(name for where, name in found if where == "gradient") == "lm_head.weight"


def test_column_that_no_role_computes_is_all_that_is_named(keeper):
    batch = step_batch()
    batch["advantages"][8] = math.nan
    fault = Fault(what="advantages is nan", column="advantages")
    found, metrics, gradients = keeper.rerun(keeper.bundle(batch=batch, fault=fault))
    assert found == [("column", "advantages")] and not metrics and not gradients


@pytest.mark.parametrize("column,role", [("old_logprobs", "actor"), ("values", "critic")])
def test_column_that_a_role_computes_is_computed_again_and_its_module_named(keeper, column, role):
    batch = step_batch()
    batch[column][8] = math.nan
    fault = Fault(what=f"{column} is nan", column=column)
    roles = ("critic", "actor") if role == "critic" else ("actor",)
    found, _, _ = keeper.rerun(keeper.bundle(poison, batch=batch, roles=roles, fault=fault))
    assert found[:3] == [("column", column), ("weight", f"{UP}.weight"), ("forward", UP)]


def test_healthy_step_comes_out_as_it_was_for_every_role(keeper):
    batch = step_batch()
    own = on_policy_rows(batch["group"], config(keeper.model).actor, seed=0)
    batch["old_logprobs"][torch.isin(batch.row_of_token, torch.tensor(own))] = NOT_ASKED
    bundle = keeper.bundle(batch=batch, roles=("critic", "actor"), trains=True)
    found, metrics, gradients = keeper.rerun(bundle)
    assert not found and own == [0, 1, 2, 3]
    recorded = bundle.facts["metrics"]
    assert recorded["actor/updates"] == recorded["critic/updates"] == 2
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/updates"):
        assert metrics[name] == pytest.approx(recorded[name], rel=1e-4), name
    norm = math.sqrt(sum(float(g.square().sum()) for name, g in gradients.items() if name.startswith("actor/")))
    assert norm > 0.1  # before it was clipped


@pytest.mark.parametrize("dtype,bound", [("bfloat16", 0.1), ("float16", 0.0125)])
def test_other_precision_gives_nearly_the_same_gradient(keeper, dtype, bound):
    bundle = keeper.bundle()
    _, _, exact = keeper.rerun(bundle)
    _, _, rounded = keeper.rerun(bundle, Changes(dtype=dtype))
    whole, *parameters = compare(rounded, exact)
    assert whole.name == WHOLE and 1e-4 < whole.relative < bound and whole.cosine > 0.99
    assert len(parameters) == len(exact) and parameters[0].relative >= parameters[-1].relative
    assert compare(exact, exact)[0].relative == 0.0


def test_overflow_of_float16_is_no_finding_once_a_smaller_scale_holds_it(keeper):
    batch = step_batch()
    batch["advantages"].mul_(1e5)
    bundle = keeper.bundle(batch=batch)
    _, _, exact = keeper.rerun(bundle)
    found, metrics, gradients = keeper.rerun(bundle, Changes(dtype="float16"))
    assert not found and metrics["actor/scale_retries"] > 0 and metrics["actor/updates"] == 2
    assert compare(gradients, exact)[0].relative < 0.02


def test_slope_that_is_infinite_at_any_scale_is_found_in_float16_too(keeper):
    bundle = keeper.bundle(fault=FAULTY, loss_mode="tests.e2e.losses.steep")
    found, metrics, _ = keeper.rerun(bundle, Changes(dtype="float16"))
    assert found[0] == ("backward", "logprobs") and metrics["actor/scale_retries"] == 16


def test_difference_of_gradients_is_that_of_their_norms_and_angle():
    ours = {"a": torch.tensor([3.0, 0.0]), "b": torch.zeros(2)}
    theirs = {"a": torch.tensor([0.0, 4.0]), "b": torch.zeros(2)}
    whole, a, b = compare(ours, theirs)
    assert (a.name, a.relative, a.cosine, a.norm, a.other_norm) == ("a", 5 / 4, 0.0, 3.0, 4.0)
    assert (b.relative, b.cosine) == (0.0, 1.0) and whole.relative == 5 / 4
    with pytest.raises(ValueError, match="such as b"):
        compare(ours, {"a": theirs["a"]})


def test_gradient_that_is_not_a_number_comes_first_in_a_comparison():
    differences = compare({"a": torch.tensor([1.0]), "b": torch.tensor([math.nan])}, {n: torch.ones(1) for n in "ab"})
    assert [d.name for d in differences] == [WHOLE, "b", "a"]


@pytest.mark.parametrize("wrong", ["devise=cpu", "device=tpu", "dtype", "dtype="])
def test_backend_that_is_not_understood_is_refused(wrong):
    with pytest.raises(ValueError, match="expected device=cpu or gpu"):
        replay.parse_backend(wrong)


def test_command_says_what_is_wrong_with_its_bundle_and_device(keeper, capsys):
    assert replay.main([str(keeper.folder)]) == 2 and "no replay bundle" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert replay.main([str(keeper.bundle().folder), "--with", "device=gpu"]) == 2
        assert "torch sees no GPU" in capsys.readouterr().err


def test_train_reports_the_first_updates_gradient_and_all_updates_metrics(keeper):
    bundle = keeper.bundle()
    setup = bundle.setup()
    setup.ref = None
    worker = ModelWorker(0, 1)
    worker.connect(f"file://{keeper.folder}/store", 60.0)
    try:
        worker.build(setup)
        work = keeper.work(worker, "actor", bundle, bundle.batch())
        findings, metrics, gradients = train(worker, "actor", work, bundle.algorithm())
        assert not findings and metrics["actor/updates"].value == len(work.steps) == 2
        assert set(gradients) == {
            f"actor/{name.removeprefix('model.')}" for name, _ in worker.engines["actor"].model.named_parameters()
        }
    finally:
        worker.shutdown()
