"""The kernel's list of GPUs, architectures, and ROCm's version."""

import pytest

from rlpost.rocm import Gpu, check_architectures, gfx_name, hip_version, list_gpus


def write_node(folder, *, memory_bytes=(), **properties):
    folder.mkdir(parents=True)
    (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
    for number, size in enumerate(memory_bytes):
        (folder / "mem_banks" / str(number)).mkdir(parents=True)
        (folder / "mem_banks" / str(number) / "properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")


def test_gpus_are_listed_in_order_without_cpus_and_without_those_of_other_containers(tmp_path):
    write_node(tmp_path / "0", cpu_cores_count=96, simd_count=0, gfx_target_version=0)
    for number, unique_id in ((2, 0xA1), (10, 0xA2)):  # 10 after 2
        write_node(
            tmp_path / str(number),
            memory_bytes=[100, 7],
            simd_count=1216,
            gfx_target_version=90402,
            unique_id=unique_id,
        )
    (tmp_path / "3").mkdir()  # the kernel gives no properties of devices outside this container
    assert list_gpus(tmp_path) == [
        Gpu("gfx942", "GPU-00000000000000a1", 107),
        Gpu("gfx942", "GPU-00000000000000a2", 107),
    ]


def test_hosts_without_the_driver_have_no_gpus(tmp_path):
    assert list_gpus(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")]
)
def test_gfx_names_are_those_of_compilers(number, name):
    assert gfx_name(number) == name


@pytest.mark.parametrize(
    ("text", "version"), [("7.2.53211-e1a6bc5663", (7, 2)), ("7.14.0", (7, 14)), (None, (0, 0)), ("", (0, 0))]
)
def test_hip_version_reads_torchs(text, version):
    assert hip_version(text) == version


def test_supported_architectures_pass_and_others_are_named_with_what_is_supported():
    check_architectures({"0": "gfx942", "1": "gfx950"})
    with pytest.raises(ValueError, match=r"GPU 3 is gfx1100, .*MI300X.*MI355X.*leave it out of HIP_VISIBLE_DEVICES"):
        check_architectures({"0": "gfx942", "3": "gfx1100"})
