"""What a config needs of a device, from its keys and its checkpoint."""

import math

import pytest

from rlpost.platform import Platform
from rlpost.trainer.fit import check_fit
from rlpost.workers.model import ModelShape, model_shape
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.manifest import checkpoint_shapes
from tests import tiny
from tests.unit.trainer.test_build import compose


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fits(folder):
    """Whether the trainer of `overrides` fits into this many bytes for each parameter."""
    num_parameters = sum(math.prod(shape) for shape in checkpoint_shapes(folder).values())

    def fits(bytes_each, *overrides, num_ranks=1):
        cfg = compose("rollout.gpu_memory_utilization=0.9", *overrides)
        placement = Placement(
            num_ranks=num_ranks,
            num_replicas=num_ranks,
            tensor_parallel=1,
            platform=Platform("cuda"),
            memory_bytes=math.ceil(bytes_each * num_parameters),
        )
        try:
            check_fit(cfg, tiny.model_info(folder), placement, sleep=True)
        except ValueError as error:
            assert "cannot fit" in str(error)
            return False
        return True

    return fits


@pytest.mark.parametrize(
    ("bytes_each", "overrides"),
    [
        (16, ["algo=grpo", "algo.use_kl_loss=false"]),
        (20, ["algo=grpo", "algo.use_kl_loss=true"]),  # a reference in float32, on CPU the compute dtype
        (32, ["algo=ppo"]),
        (5, ["algo=grpo", "algo.use_kl_loss=true", "model.lora_rank=4"]),  # no reference, no optimizer to speak of
    ],
)
def test_roles_and_adapters_decide_what_a_parameter_costs(fits, bytes_each, overrides):
    assert fits(bytes_each, *overrides)
    assert not fits(bytes_each - 1.2, *overrides)


def test_shards_divide_it(fits):
    assert fits(8, "algo=grpo", "algo.use_kl_loss=false", num_ranks=2)
    assert not fits(8, "algo=grpo", "algo.use_kl_loss=false", "actor.fsdp.fsdp_size=1", num_ranks=2)


def test_nothing_is_asked_of_a_cpu(folder):
    placement = Placement(num_ranks=1, num_replicas=1, tensor_parallel=1, platform=Platform("cpu"))
    check_fit(compose(), tiny.model_info(folder), placement, sleep=False)


class TextConfig:
    def __init__(self, **fields):
        self.__dict__ |= fields


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            TextConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=16),
            ModelShape(num_layers=2, num_kv_heads=2, head_dim=16, kv_size=64),
        ),
        (
            TextConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, num_local_experts=8),
            ModelShape(num_layers=2, num_kv_heads=4, head_dim=16, kv_size=128, num_experts=8),
        ),
        (
            TextConfig(num_hidden_layers=2, num_attention_heads=16, head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64),
            ModelShape(num_layers=2, num_kv_heads=16, head_dim=64, kv_size=576, latent_attention=True),
        ),
        (TextConfig(), ModelShape()),
    ],
)
def test_model_shape_reads_each_familys_names(config, shape):
    assert model_shape(config) == shape
