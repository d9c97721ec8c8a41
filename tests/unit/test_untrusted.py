"""What a run never does unless it is told to."""

from rlpost.config import CONFIG_DIR
from rlpost.workers.config import ModelConfig


def test_no_preset_runs_code_that_comes_with_a_checkpoint():
    assert ModelConfig().trust_remote_code is False
    assert not [path.name for path in CONFIG_DIR.rglob("*.yaml") if "trust_remote_code: true" in path.read_text()]
