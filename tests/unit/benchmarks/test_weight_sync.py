"""The benchmark of weight sync, on what a CPU has."""

import json

from benchmarks import weight_sync
from benchmarks.weight_sync import Weights


def test_one_reader_serves_senders_of_several_sizes(tmp_path):
    out = tmp_path / "weights.json"
    weight_sync.main(["--shape", "tiny", "--transport", "shm", "gloo", "--bucket-mb", "1", "64", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["transport"], row["bucket_mb"]) for row in rows] == [
        ("shm", 1),
        ("shm", 64),
        ("gloo", 1),
        ("gloo", 64),
    ]
    gigabytes = round(Weights("tiny").num_bytes / 1e9, 3)
    for row in rows:
        assert row["gigabytes"] == gigabytes
        assert min(row[f"{name}_gb_per_s"] for name in ("tensor_copy", "flat_copy")) > 0
