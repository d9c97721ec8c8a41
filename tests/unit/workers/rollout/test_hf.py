import asyncio

import pytest

from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.hf import HFEngine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_model_parallel_size": 2},
            "rollout.tensor_model_parallel_size=2: the hf engine .*one device; .* rollout=vllm",
        ),
        ({"engine_kwargs": {"eos": 1}}, "rollout.engine_kwargs.eos: the hf engine takes no arguments"),
    ],
)
def test_what_the_hf_engine_cannot_do_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(HFEngine(RolloutConfig(name="hf", **changes), None, 64).start())
