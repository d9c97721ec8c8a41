"""What `build` decides before anything is started."""

import asyncio
import signal

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from rlpost.config import CONFIG_DIR, register, to_object
from rlpost.trainer.build import _stop_on_interrupt, check_resume, count_updates, prepare
from rlpost.trainer.state import CheckpointStore
from tests.e2e import engine_contract as contract


def compose(*overrides):
    register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return to_object(hydra.compose("config", list(overrides)))
        finally:
            GlobalHydra.instance().clear()


def test_schedules_of_actor_and_critic_are_as_long_as_their_own_updates():
    cfg = compose(
        "algo=ppo",
        "data.train_batch_size=10",
        "actor.ppo_mini_batch_size=4",  # 3 mini-batches, the last of 2
        "critic.ppo_mini_batch_size=5",
        "critic.ppo_epochs=3",
        "trainer.critic_warmup=2",
    )
    assert count_updates(cfg, total_steps=7) == {"actor": 3 * 5, "critic": 2 * 3 * 7}


def test_resume_beyond_the_last_step_is_refused_before_anything_starts(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)

    async def write(folder):
        return {}

    asyncio.run(store.save(10, {}, write))
    check_resume(store, "auto", total_steps=10)  # nothing is left to do, which is fine
    with pytest.raises(ValueError, match="trainer.resume=auto: .* after step 10, but the run ends at step 5; raise"):
        check_resume(store, "auto", total_steps=5)


def test_sequences_longer_than_the_model_was_built_for_are_refused(tmp_path):
    checkpoint = contract.make_checkpoint(tmp_path, tied=True)
    prompt = checkpoint.max_position_embeddings - 7
    overrides = ["model=hf", f"model.path={checkpoint.path}", f"data.max_prompt_length={prompt}"]
    prepare(compose(*overrides, "data.max_response_length=7"))
    with pytest.raises(ValueError, match="max_response_length = .* built for .*max_position_embeddings"):
        prepare(compose(*overrides, "data.max_response_length=8"))


def test_signal_handlers_are_those_of_before_once_the_run_has_ended():
    def mine(number, frame):
        pass

    class Trainer:
        stop_requested = False

    class Reporter:
        def note(self, text):
            self.text = text

    async def run(trainer, reporter):
        before = signal.signal(signal.SIGTERM, mine)
        try:
            with _stop_on_interrupt(trainer, reporter):
                signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0.01)
            return signal.getsignal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)

    trainer, reporter = Trainer(), Reporter()
    assert asyncio.run(run(trainer, reporter)) is mine
    assert trainer.stop_requested and "saving a checkpoint" in reporter.text
