import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpost.workers.rollout.base import EngineLost
from rlpost.workers.rollout.processes import EngineProcesses, Guard, ProcessLog, children, end


def wait_for(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def alive_in(process: psutil.Process, folder: Path) -> bool:
    """Whether the process runs in that working directory."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.Error:
        return False


def test_log_passes_lines_on_and_remembers_the_error_behind_the_last(capfd):
    log = ProcessLog()
    script = (
        "import sys; print('loading'); sys.stderr.write("
        "'(EngineCore pid=9) ERROR 01-01 00:00:00 [a.py:1] ValueError: no such head\\nEngineDeadError: see above\\n')"
    )
    with log.capture():
        child = subprocess.Popen([sys.executable, "-c", script])
    child.wait()
    assert wait_for(lambda: log.cause() == "ValueError: no such head")
    assert wait_for(lambda: "loading" in (capfd.readouterr().err or "loading"))


def test_log_restores_our_own_output(capfd):
    with ProcessLog().capture():
        pass
    os.write(1, b"ours\n")
    assert capfd.readouterr().out == "ours\n"


def test_end_kills_only_what_it_is_given():
    before = children()
    ours = subprocess.Popen(["sleep", "60"])
    other = subprocess.Popen(["sleep", "60"])
    end(child for child in children() - before if child.pid == ours.pid)
    assert not psutil.pid_exists(ours.pid) and other.poll() is None
    end(children() - before)
    other.wait(5)


def test_end_kills_what_is_started_meanwhile(tmp_path):
    script = "import subprocess, time\nwhile True: subprocess.Popen(['sleep', '61']); time.sleep(0.005)"
    for _ in range(3):
        parent = psutil.Process(subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path).pid)
        wait_for(lambda parent=parent: len(parent.children()) > 2)
        end([parent])
    assert [process.pid for process in psutil.process_iter() if alive_in(process, tmp_path)] == []


@pytest.mark.parametrize("dismissed", [False, True])
def test_guard_kills_its_charges_when_we_are_killed(dismissed):
    script = (
        "import os, psutil, signal, subprocess\n"
        "from rlpost.workers.rollout.processes import Guard\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "guard = Guard([psutil.Process(child.pid)])\n"
        f"{'guard.dismiss()' if dismissed else ''}\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    pid = int(parent.stdout)

    def gone() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    assert wait_for(gone, 0.5 if dismissed else 10.0) is not dismissed
    if dismissed:
        os.kill(pid, 9)


def test_guard_is_dismissed_without_leaving_a_process():
    before = children()
    Guard([]).dismiss()
    assert children() == before


def test_engine_that_takes_too_long_to_start_is_ended():
    async def main():
        processes = EngineProcesses("Slow")
        before = children()
        with pytest.raises(
            RuntimeError, match="Slow did not start within rollout.startup_timeout_s=0.2; its last words: "
        ):
            with processes.starting(0.2):
                subprocess.Popen(["sleep", "60"]).wait()
                raise RuntimeError("it is gone")
        assert children() == before

    asyncio.run(main())


def test_engine_whose_process_ends_is_reported_to_whoever_waits():
    async def main():
        processes = EngineProcesses("Frail")
        before = children()
        with processes.starting(10):
            script = "import sys, time; print('ValueError: no luck', file=sys.stderr, flush=True); time.sleep(60)"
            child = subprocess.Popen([sys.executable, "-c", script])
        assert await processes.call(asyncio.sleep(0, "done")) == "done"
        await asyncio.to_thread(wait_for, lambda: processes._log.cause() != "")
        waiting = asyncio.ensure_future(processes.call(asyncio.sleep(60)))
        await asyncio.sleep(0)
        child.kill()
        with pytest.raises(EngineLost, match="the Frail engine died: ValueError: no luck"):
            await waiting
        processes.end()
        child.wait()
        assert children() == before

    asyncio.run(main())


def test_signal_handlers_of_an_engine_do_not_stay():
    script = (
        "import asyncio, os, signal, sys, threading\n"
        "from rlpost.workers.rollout.processes import keep_signal_handlers\n"
        "def end_all(*args): os._exit(3)\n"
        "async def main():\n"
        "    signal.signal(signal.SIGTERM, lambda *args: os._exit(4))\n"
        "    with keep_signal_handlers():\n"
        "        signal.signal(signal.SIGQUIT, end_all)\n"
        "        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end_all)\n"
        "    os.kill(os.getpid(), signal.SIGQUIT)\n"
        "    await asyncio.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await asyncio.sleep(5)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 4


def test_sigquit_can_be_ignored_from_any_thread():
    script = (
        "import os, signal, threading\n"
        "from rlpost.workers.rollout.processes import keep_signal_handlers\n"
        "def work():\n"
        "    with keep_signal_handlers():\n"
        "        pass\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()\n"
        "os.kill(os.getpid(), signal.SIGQUIT)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
