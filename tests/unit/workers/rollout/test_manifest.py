import json
import struct

import pytest

from rlpost.workers.rollout.base import WeightManifest
from rlpost.workers.rollout.manifest import UpdateLedger, check_manifest, checkpoint_shapes

EXPECTED = {"a.weight": (2, 3), "b.weight": (4,), "lm_head.weight": (2, 3)}


def manifest(**changes) -> WeightManifest:
    shapes = {"a.weight": (2, 3), "b.weight": (4,)} | {k.replace("__", "."): v for k, v in changes.items()}
    return WeightManifest(version=7, tensors={k: (v, "float32") for k, v in shapes.items() if v is not None})


def test_checkpoint_shapes_come_from_the_headers_of_all_files(tmp_path):
    for number, names in enumerate((["x"], ["y"])):
        header = {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} for name in names}
        text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
        (tmp_path / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    assert checkpoint_shapes(tmp_path) == {"x": (2, 3), "y": (2, 3)}


def test_checkpoint_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no .*safetensors"):
        checkpoint_shapes(tmp_path)


def test_manifest_may_leave_out_or_bring_a_tied_head():
    check_manifest(manifest(), EXPECTED)
    check_manifest(manifest(lm_head__weight=(2, 3)), {k: v for k, v in EXPECTED.items() if k != "lm_head.weight"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b__weight": None}, "update 7 .*missing: b.weight"),
        ({"c__weight": (1,)}, "unknown: c.weight"),
        ({"a__weight": (3, 2)}, r"a.weight is \[3, 2\], expected \[2, 3\]"),
    ],
)
def test_manifest_that_does_not_fit_names_the_difference(changes, message):
    with pytest.raises(ValueError, match=message):
        check_manifest(manifest(**changes), EXPECTED)


def test_ledger_takes_each_name_once_and_all_of_them():
    ledger = UpdateLedger(manifest())
    ledger.take(["a.weight"])
    with pytest.raises(ValueError, match="sent twice or not announced: a.weight"):
        ledger.take(["a.weight"])
    with pytest.raises(ValueError, match="never sent: b.weight"):
        ledger.finish()
    with pytest.raises(ValueError, match="sent twice"):
        ledger.take(["b.weight", "b.weight"])
    ledger.take(["b.weight"])
    ledger.finish()
