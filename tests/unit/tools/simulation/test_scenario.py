"""Scenarios from files and overrides."""

import json

import pytest

from rlpost.tools.simulation.scenario import Scenario, read_scenario


def test_overrides_beat_the_file_and_lists_multiply(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"devices": 64, "tail": 3, "max_staleness": None}))
    swept, scenarios = read_scenario(path, ["tail=2,4", "rollout_share=0.25,0.5", "partial_rollout=false"])
    assert swept == {"tail": [2.0, 4.0], "rollout_share": [0.25, 0.5]}
    assert [(s.tail, s.rollout_share) for s in scenarios] == [(2.0, 0.25), (2.0, 0.5), (4.0, 0.25), (4.0, 0.5)]
    assert {(s.devices, s.partial_rollout, s.max_staleness) for s in scenarios} == {(64.0, False, None)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("devces=2", "'devces' is no key of a scenario; .*devices"),
        ("devices", "expected key=value"),
        ("batch=many", "batch=many: expected int"),
        ("partial_rollout=maybe", "expected bool"),
        ("rollout_share=1", "leaves no device to train on"),
        ("batch=510", "batch=510 is not divisible by steps_per_batch=4"),
        ("sync_s=-1", "sync_s=-1.0: must be >= 0 seconds"),
        ("max_staleness=1", "trainer.max_staleness=1 with trainer.trigger_parameter_sync_step=4"),
        ("on_stale=never", "on_stale=never: expected one of wait, drop, abort"),
        ("decode_step_s=nan", "decode_step_s=nan: must be >= 0 seconds, and finite"),
        ("train_token_s=inf", "train_token_s=inf: must be >= 0 seconds, and finite"),
        ("mean_length=null", "mean_length=null: expected float"),
        ("devices=", "devices=null: expected float"),
        ("batch_devices=0", "batch_devices=0.0: must be > 0"),
        ("grow_to=0", "grow_to=0.0: must be > 0"),
        ("warmup=-1", "warmup=-1: must be >= 0"),
        ("prompt_tokens=-5", "prompt_tokens=-5: must be >= 0"),
        ("weight_bytes=-1", "weight_bytes=-1.0: must be >= 0"),
        ("max_concurrent_groups=0", "max_concurrent_groups=0: must be >= 1"),
        ("trigger_parameter_sync_step=0", "trigger_parameter_sync_step=0: must be >= 1"),
        ("staleness_threshold=-1", "staleness_threshold=-1.0: must be >= 0"),
        ("delivery=random", "expected one of issued, bounded, finished"),
    ],
)
def test_wrong_values_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        read_scenario(None, [override])


@pytest.mark.parametrize("text", [None, "[1]", '{"devices": 2', '{"devices": [2, 4]}'])
def test_file_that_is_no_scenario_is_named(tmp_path, text):
    path = tmp_path / "s.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"s\.json: no scenario|devices=\[2, 4\]: expected float"):
        read_scenario(path)


def test_sampling_may_wait_for_the_device_alone_but_not_for_nothing():
    host = {"decode_step_s": 0.0, "decode_sequence_s": 0.0}
    assert Scenario(**host, device_step_s=0.01).device_step_s == 0.01
    with pytest.raises(ValueError, match="sampling takes no time"):
        Scenario(**host)


def test_batch_grows_with_the_devices_where_asked():
    grown = Scenario(devices=64, batch=512, batch_devices=32, steps_per_batch=4)
    assert (grown.groups, grown.groups_per_step, grown.limits.capacity) == (1024, 256, 1536)
    assert Scenario(devices=64, batch=512).groups == 512


def test_engines_on_less_than_their_devices_are_slower_in_proportion():
    scenario = Scenario(devices_per_replica=4)
    assert scenario.replicas(16) == (4, 1.0)
    assert scenario.replicas(1) == (1, 0.25)
