"""Numbers that are not finite, planted in each column and in what training reports: named, then stopped or skipped."""

import asyncio
from contextlib import nullcontext

import pytest
import torch

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, KLControlConfig
from rlpost.batch import Batch, collate
from rlpost.metrics import Metric, Reduce
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.history import History
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.nonfinite import CHECKED, NonFinite, fault_of_update, faults, require_finite
from rlpost.trainer.replay import Bundle, ReplayStore
from rlpost.trajectory import NOT_ASKED
from tests.unit.trainer.rollouts import group, prompt
from tests.unit.trainer.whole_trainer import make_trainer

NAN, INF = float("nan"), float("inf")


def batch():
    """Two groups of two samples: 2 tokens of prompt and 2 of answer each; every column is 0."""
    made = collate([group(prompt(i), [1.0, 0.0], num_tokens=2) for i in (40, 41)], 2)
    return made.update({name: torch.zeros(made.num_tokens) for name in CHECKED})


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("column", CHECKED)
def test_number_that_is_not_finite_is_named_by_column_sample_and_token(column, number):
    wrong = batch()
    require_finite(wrong)
    wrong[column][3 * 4 + 2] = number
    with pytest.raises(NonFinite, match=f"^{column} is {number} at token 2 of sample 1 of group 41$") as caught:
        require_finite(wrong)
    assert caught.value.fault.column == column


def test_first_column_in_which_something_went_wrong_is_named_first_and_tokens_are_counted():
    wrong = batch()
    for column in ("advantages", "old_logprobs"):
        wrong[column][[2, 3, 7]] = NAN
    found = list(faults(wrong))
    assert [fault.column for fault in found] == ["old_logprobs", "advantages"]
    assert found[0].what.endswith("token 2 of sample 0 of group 40, and 2 more of 8 response tokens are not finite")


def test_numbers_of_tokens_that_are_not_trained_do_not_matter():
    dirty = batch()
    for column in CHECKED:
        dirty[column][~dirty["response_mask"]] = NAN
    assert list(faults(dirty)) == []
    require_finite(dirty)


def test_logprobs_that_the_engine_was_not_asked_for_are_no_fault_but_infinities_beside_others_are():
    some = batch()
    some["rollout_logprobs"][4:8] = NOT_ASKED
    require_finite(some)
    some["rollout_logprobs"][2] = NOT_ASKED
    with pytest.raises(NonFinite, match="rollout_logprobs is inf at token 2 of sample 0 of group 40$"):
        require_finite(some)


def test_old_logprobs_that_nobody_asked_for_are_no_fault_but_infinities_beside_others_are():
    some = batch()
    some["old_logprobs"][4:12] = NOT_ASKED
    require_finite(some)
    for number in (NAN, INF, -INF):
        wrong = batch().update({"old_logprobs": some["old_logprobs"].clone()})
        wrong["old_logprobs"][3] = number
        with pytest.raises(NonFinite, match=f"old_logprobs is {number} at token 3 of sample 0 of group 40$"):
            require_finite(wrong)


def test_nan_in_a_group_that_the_engine_was_not_asked_for_is_seen_though_the_gate_compares_none_of_it():
    some = batch()
    some["rollout_logprobs"][4:8] = NOT_ASKED
    some["old_logprobs"][6] = NAN
    with pytest.raises(NonFinite, match="old_logprobs is nan at token 2 of sample 1 of group 40"):
        require_finite(some)


def update_metrics(role="actor", updates=1.0, losses=0.0):
    """What training reports when the update after `updates` was not made."""
    counts = {"updates": updates, "skipped_updates": 1.0, "nonfinite_losses": losses}
    return {f"{role}/{name}": Metric(value, reduce=Reduce.SUM) for name, value in counts.items()}


def test_update_that_was_not_made_is_told_by_its_role_number_and_part():
    assert fault_of_update("actor", {}) is None
    gradient = fault_of_update("critic", update_metrics("critic", updates=3.0))
    assert (gradient.role, gradient.update) == ("critic", 3) and "the gradient, though no loss" in gradient.what
    loss = fault_of_update("actor", update_metrics(losses=2.0))
    assert "the loss of 2 micro-batches of the actor's update 1" in loss.what
    assert "float16" not in gradient.what + loss.what
    half = fault_of_update("critic", update_metrics("critic") | {"critic/loss_scale": Metric(1.0)})
    assert half.what.endswith("is not finite. float16 ends at 65,504; critic.dtype=bfloat16 has float32's range")


class World:
    """Source, workers, gate and reporter in one: `columns` and `reports` say by step what goes wrong."""

    def __init__(self, folder, columns=None, reports=None):
        self.folder, self.columns, self.reports = folder, columns or {}, reports or {}
        self.step, self.trained, self.published, self.checked = 0, [], [], []
        self.steps, self.notes = {}, []

    async def take(self, n):
        self.step += 1
        return [group(prompt(self.step), [1.0, 0.0], num_tokens=2)]

    def on_policy_rows(self, batch, step):
        return []

    async def infer(self, column, batch, rows):
        values = torch.full((batch.num_tokens,), -1.0)
        if column == self.columns.get(self.step):
            values[-1] = NAN
        return Batch(batch.cu_seqlens, {column: values})

    async def train(self, role, batch, objective, step):
        self.trained.append((step, role))
        return self.reports.get((step, role), {f"{role}/lr": Metric(1.0)})

    async def publish(self, version):
        self.published.append(version)
        return {}

    async def call_async(self, method, *args):
        if method == "save" and (args[0].parent.parent.name == "replay"):
            (args[0] / "saved").touch()
        return [{}]

    async def probe(self, source, version):
        return {}

    async def check(self, batch, version):
        self.checked.append(version)
        return {}

    def metrics(self):
        return {}

    def without_push(self):
        return nullcontext()

    def state_dict(self):
        return {}

    def step_done(self, step, values):
        self.steps[step] = values

    def rollouts(self, step, groups):
        pass

    def summary(self, step, wall_s, finished):
        return {"steps": step}

    def note(self, text):
        self.notes.append(text)


class Reporter:
    def __init__(self, world):
        self.folder, self.rollouts, self.summary, self.note = world.folder, world.rollouts, world.summary, world.note
        self.step, self.state_dict = world.step_done, world.state_dict


@pytest.fixture
def run(tmp_path):
    """Four steps of a PPO run with KL in the reward; the trainer after them."""

    def run(world, ledger=None, **cfg):
        algo = AlgoConfig(
            adv_estimator="gae",
            use_kl_in_reward=True,
            kl_penalty="k1",
            kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=10),
        )
        trainer = make_trainer(
            TrainerConfig(resume="never", export_hf=False, **cfg),
            Algorithm(algo, max_response_length=8),
            tmp_path,
            source=world,
            workers=world,
            gate=world,
            reporter=Reporter(world),
            total_steps=4,
            replays=ReplayStore(tmp_path / "replay", {}, keep=cfg.get("max_replays_to_keep")),
            ledger=ledger,
        )
        asyncio.run(trainer.fit())
        return trainer

    return run


@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs", "values"])
def test_run_stops_at_a_column_before_the_gate_and_names_the_bundle(run, tmp_path, column):
    world = World(tmp_path, columns={2: column})
    with pytest.raises(NonFinite, match=rf"step 2: {column} is nan .*tools.replay {tmp_path}/replay/nonfinite_step_2"):
        run(world)
    assert world.checked == [0] and {step for step, _ in world.trained} == {1}
    bundle = Bundle.read(tmp_path / "replay" / "nonfinite_step_2")
    assert bundle.fault.column == column and bundle.batch()[column][-1].isnan()
    assert (bundle.folder / "weights" / "saved").exists()


def test_skipped_step_trains_nothing_further_but_its_version_is_published_and_counted(run, tmp_path):
    """Step 2: its values; step 3: the critic's update, before the actor's turn."""
    world = World(tmp_path, columns={2: "values"}, reports={(3, "critic"): update_metrics("critic")})
    trainer = run(world, on_nonfinite="skip")
    assert world.trained == [(1, "critic"), (1, "actor"), (3, "critic"), (4, "critic"), (4, "actor")]
    assert world.published == [0, 1, 2, 3, 4] and trainer.step == 4
    assert [world.steps[i]["train/skipped_steps"] for i in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert len(world.notes) == 2 and "step 3: the gradient" in world.notes[1]
    assert Bundle.read(tmp_path / "replay" / "nonfinite_step_3").roles == ["critic"]


def test_skipped_step_leaves_the_kl_controller_as_it_was(run, tmp_path):
    """The mean KL of a batch with a NaN is none, and the coefficient would never be a number again."""
    skipped = run(World(tmp_path, columns={4: "old_logprobs"}), on_nonfinite="skip")
    three = Algorithm.state_dict(skipped._algorithm)["kl_coef"]
    assert three == pytest.approx(0.1 * (1 - 0.2 * 2 / 10) ** 3)  # KL is 0, far below its target: three steps' worth


def test_steps_that_are_skipped_one_after_the_other_stop_the_run(run, tmp_path):
    world = World(tmp_path, columns={1: "values", 3: "values", 4: "values"})
    with pytest.raises(NonFinite, match=r"step 4: .*the last of trainer.max_skipped_steps=2 in a row"):
        run(world, on_nonfinite="skip", max_skipped_steps=2)


def test_only_the_newest_bundles_of_skipped_steps_are_kept_and_those_asked_for_all(run, tmp_path):
    world = World(tmp_path, columns={2: "values", 3: "values", 4: "values"})
    run(world, on_nonfinite="skip", max_skipped_steps=9, max_replays_to_keep=2, save_replay_steps=[1])
    assert sorted(p.name for p in (tmp_path / "replay").iterdir()) == ["nonfinite_step_3", "nonfinite_step_4", "step_1"]
    kept = Bundle.read(tmp_path / "replay" / "step_1")
    assert kept.fault is None and kept.roles == ["critic", "actor"] and kept.facts["metrics"]["actor/lr"] == 1.0


def test_fault_is_told_though_its_bundle_cannot_be_written(run, tmp_path):
    (tmp_path / "replay").write_text("a file where the folder should be")
    with pytest.raises(NonFinite, match="step 1: values is nan .*could not be written: .*replay"):
        run(World(tmp_path, columns={1: "values"}))


def test_no_source_file_replaces_what_is_not_a_number():
    from rlpost.config import PACKAGE

    users = [path.name for path in PACKAGE.rglob("*.py") if "nan_to_num" in path.read_text()]
    assert users == []


def test_bundle_of_another_format_or_none_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no replay bundle"):
        Bundle.read(tmp_path)
    (tmp_path / "bundle.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        Bundle.read(tmp_path)


def test_ledger_has_the_groups_of_a_skipped_step_dropped_and_no_step_missing(run, tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    run(World(tmp_path, columns={2: "values"}), ledger=ledger, on_nonfinite="skip")
    history = History.read(tmp_path / "ledger.jsonl")
    assert history.steps == {1: ["d/0/1"], 2: [], 3: ["d/0/3"], 4: ["d/0/4"]}
    assert history.counts()["dropped_not_finite"] == 1
    assert not [problem for problem in history.problems() if "missing" in problem or "lost" in problem]
