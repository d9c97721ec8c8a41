"""REINFORCE with a learned baseline (Williams 1992), composed of rlpost's workers without its trainer.

python examples/custom_trainer/reinforce.py
"""

import asyncio
from pathlib import Path

import ray

from rlpost.batch import collate
from rlpost.data import PromptStream
from rlpost.data_config import DataConfig
from rlpost.metrics import Metric
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RolloutConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.model import inspect
from rlpost.workers.placement import Placement, Pools
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import make_weight_sync

CACHE = Path("~/.cache/rlpost").expanduser()
TRAIN = "task://rlpost.tasks.addition.problems?digits=2&size=4000&seed=1&split=train"


def policy_loss(micro, output):
    """-(return - baseline) * logprob of each response token."""
    loss = -micro["advantages"] * output.logprobs
    return (loss * micro["loss_weights"]).sum(), {}


def baseline_loss(micro, output):
    """Squared error of the baseline."""
    error = (output.values - micro["returns"]) ** 2
    return (error * micro["loss_weights"]).sum(), {"baseline/mse": Metric(float(error.mean()), len(error))}


async def train(model="maker:rlpost.tasks.quickstart.make_quickstart", engine="hf", steps=30, prompts=64, n=2, seed=1):
    """Train for `steps`; returns the mean reward of each."""
    model_cfg = ModelConfig(path=model)
    info, tokenizer = inspect(model_cfg, CACHE, seed)
    data = DataConfig(train_files=TRAIN, max_prompt_length=8, max_response_length=5)
    stream = PromptStream(data, tokenizer, seed)
    spec = SamplingSpec(temperature=1.0, max_tokens=5, vocab_size=info.vocab_size, stop_token_ids=info.stop_token_ids)
    reward = RewardConfig(terms={"accuracy": RewardTermConfig(fn="exact_match")})
    actor = ActorConfig(ppo_mini_batch_size=prompts, optim=OptimConfig(lr=3e-4))
    critic = CriticConfig(ppo_mini_batch_size=prompts, optim=OptimConfig(lr=1e-3))

    placement = Placement.create(Pools.colocated(1, 1), tensor_parallel=1, num_replicas=1)
    pool = RolloutPool(
        RolloutConfig(name=engine), info, reward, placement, seed=seed, max_prompt_length=8, max_response_length=5
    )
    workers = WorkerGroup.start(info, model_cfg, actor, critic=critic, placement=placement, seed=seed)
    await pool.start()
    await asyncio.to_thread(workers.load)
    sync, rewards = make_weight_sync(workers, pool), []
    for step in range(steps):
        await sync.push(version=step)
        batch = collate(await pool.run(stream.next(prompts), n, spec), n)
        batch.update(await workers.infer("values", batch))
        score = batch["rewards"].new_zeros(len(batch)).index_add(0, batch.row_of_token, batch["rewards"])
        returns = score[batch.row_of_token]
        batch.update({"returns": returns, "advantages": returns - batch["values"]})
        await workers.train("critic", batch, baseline_loss, step)
        await workers.train("actor", batch, policy_loss, step)
        rewards.append(float(score.mean()))
        print(f"step {step:3d}  reward {rewards[-1]:.3f}")
    await pool.shutdown()
    workers.shutdown()
    return rewards


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    asyncio.run(train())
