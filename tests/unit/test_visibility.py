"""Visibility variables: what they leave, how devices are renumbered, and which contradictions are refused."""

import pytest

from rlpost.visibility import hip_uuid, mask_env, resolve_visibility

UUIDS = [f"GPU-{0xA0 + i:016x}" for i in range(4)]


def rocm(num_devices=4, uuids=UUIDS, **env):
    names = {"hip": "HIP_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES", "rocr": "ROCR_VISIBLE_DEVICES"}
    return resolve_visibility("rocm", {names.get(k, k): v for k, v in env.items()}, num_devices, uuids)


def physical(visibility):
    return [device.physical for device in visibility.devices]


def test_nothing_set_shows_every_device():
    assert physical(rocm()) == [0, 1, 2, 3]
    assert rocm().env() == {"HIP_VISIBLE_DEVICES": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize("variable", ["hip", "cuda"])
def test_either_mask_serves_and_both_are_set_for_children(variable):
    visibility = rocm(**{variable: "3, 1"})
    assert physical(visibility) == [3, 1]
    assert [device.logical for device in visibility.devices] == [0, 1]
    assert visibility.env() == {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "3,1"}
    assert visibility.env([visibility.devices[1].mask]) == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}


def test_alike_masks_are_one_mask():
    assert physical(rocm(hip="2,3", cuda="2, 3")) == [2, 3]


def test_rocr_alone_becomes_hips_mask_of_the_same_devices():
    visibility = rocm(rocr=f"{UUIDS[3]},2")
    assert physical(visibility) == [3, 2]
    assert visibility.env()["HIP_VISIBLE_DEVICES"] == "3,2"
    assert [device.uuid for device in visibility.devices] == [UUIDS[3], UUIDS[2]]
    with pytest.raises(ValueError, match="ROCR_VISIBLE_DEVICES=GPU-77 cannot be looked up"):
        rocm(rocr="GPU-77", uuids=())


def test_rocr_and_hip_that_mean_the_same_devices_either_way_are_accepted():
    assert physical(rocm(rocr="0,1,2", hip="2,0")) == [2, 0]
    assert physical(rocm(rocr=f"{UUIDS[2]},{UUIDS[3]}", hip=UUIDS[3])) == [3]


@pytest.mark.parametrize(("rocr", "hip"), [("2,3", "0,1"), ("2,3", "2,3"), ("1,0", "0"), ("0,1", "2")])
def test_rocr_and_hip_that_contradict_are_refused_with_both_and_the_fix(rocr, hip):
    expected = f"ROCR_VISIBLE_DEVICES={rocr} and HIP_VISIBLE_DEVICES={hip} contradict.*Unset ROCR_VISIBLE_DEVICES"
    with pytest.raises(ValueError, match=expected):
        rocm(rocr=rocr, hip=hip)


def test_hip_and_cuda_that_differ_are_refused_with_both():
    with pytest.raises(ValueError, match="HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 disagree.*unset CUDA"):
        rocm(hip="0", cuda="1")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("4", "'4' is no device here; there are: 0 "),
        ("0,0", "names a device twice"),
        (f"0,{UUIDS[0]}", "names a device twice"),
        ("GPU-ffff", "'GPU-ffff' is no device here"),
        ("GPU-00", "'GPU-00' is more than one device here"),
        ("0,x", "'x' is no device here"),
    ],
)
def test_masks_that_name_no_single_device_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        rocm(hip=mask)


@pytest.mark.parametrize("mask", ["", "-1"])
def test_masks_that_hide_all_leave_none(mask):
    assert rocm(hip=mask).devices == ()


def test_a_third_mask_under_hip_is_refused():
    with pytest.raises(ValueError, match="GPU_DEVICE_ORDINAL=0 is one more mask"):
        rocm(GPU_DEVICE_ORDINAL="0")


def test_uuid_masks_become_numbers_where_the_host_is_known_and_stay_otherwise():
    assert rocm(hip=f"{UUIDS[3]},{UUIDS[1].upper()}").env()["HIP_VISIBLE_DEVICES"] == "3,1"
    assert rocm(hip="GPU-00000000000000a2").devices[0].physical == 2
    unknown = rocm(hip="GPU-77,GPU-78", num_devices=None, uuids=())
    assert unknown.env()["HIP_VISIBLE_DEVICES"] == "GPU-77,GPU-78" and physical(unknown) == [None, None]


def test_hosts_that_cannot_be_counted_need_a_mask():
    with pytest.raises(ValueError, match="could not be counted: name them in CUDA_VISIBLE_DEVICES"):
        rocm(num_devices=None)


def test_a_device_is_found_by_the_uuid_that_another_process_gives_it():
    visibility = rocm(hip="3,1")
    as_torch_prints = "".join(f"{ord(c):02x}" for c in "00000000000000a1")
    assert visibility.by_uuid(UUIDS[1]).logical == visibility.by_uuid(as_torch_prints).logical == 1
    with pytest.raises(ValueError, match="device GPU-00000000000000a0 is not visible here"):
        visibility.by_uuid(UUIDS[0])


def test_hip_uuid_reads_torchs_form_and_leaves_others():
    torchs = "30303030-3030-3030-3030-303030306131"
    assert hip_uuid(torchs) == "gpu-00000000000000a1"
    assert hip_uuid("GPU-00000000000000A1") == "gpu-00000000000000a1"
    nvidia = "6fb7cf2d-1f9d-1c7a-5a6b-0123456789ab"
    assert hip_uuid(nvidia) == nvidia


def test_cuda_keeps_its_mask_and_reads_no_other():
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "HIP_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "8"}
    visibility = resolve_visibility("cuda", env, None)
    assert visibility.env() == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert resolve_visibility("cuda", {}, 2).env() == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_cpu_has_no_masks():
    assert resolve_visibility("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, None).env() == mask_env("cpu", ["0"]) == {}
