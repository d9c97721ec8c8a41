import os
import subprocess
import sys

from rlpost import host


def test_variables_are_exported_only_for_as_long_as_asked(monkeypatch):
    monkeypatch.setenv("RLPOST_A", "before")
    monkeypatch.delenv("RLPOST_B", raising=False)
    with host.exported_while(RLPOST_A="1", RLPOST_B="2"):
        assert (os.environ["RLPOST_A"], os.environ["RLPOST_B"]) == ("1", "2")
    assert os.environ["RLPOST_A"] == "before" and "RLPOST_B" not in os.environ


def test_host_id_is_equal_in_processes_of_one_host():
    script = "from rlpost.host import host_id; print(host_id())"
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert printed.strip() == host.host_id()
