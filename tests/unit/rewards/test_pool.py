import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.rewards.pool import PoolError, ProcessPool


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(1)
    yield pool
    pool.close()


def run(pool: ProcessPool, path: str, *args: object, timeout_s: float = 20.0) -> object:
    return asyncio.run(pool.run(path, args, {}, timeout_s))


def test_pool_keeps_its_process_between_calls(pool: ProcessPool) -> None:
    assert run(pool, "os.getpid") == run(pool, "os.getpid") != os.getpid()


def test_pool_reports_an_exception_and_keeps_the_process(pool: ProcessPool) -> None:
    before = run(pool, "os.getpid")
    with pytest.raises(PoolError, match=r"ZeroDivisionError: .*child.py"):
        run(pool, "operator.truediv", 1, 0)
    with pytest.raises(PoolError, match="SystemExit: 3"):
        run(pool, "sys.exit", 3)
    with pytest.raises(PoolError, match="pickle"):
        run(pool, "threading.Lock")
    assert run(pool, "os.getpid") == before


def test_pool_replaces_a_process_that_hangs(pool: ProcessPool) -> None:
    before = run(pool, "os.getpid")
    with pytest.raises(PoolError, match="timed out: the call took more than 0.2 s"):
        run(pool, "time.sleep", 60, timeout_s=0.2)
    assert run(pool, "os.getpid") != before
    assert not alive(before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_kills_what_a_hanging_call_started(pool: ProcessPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(PoolError, match="timed out"):
        run(pool, "os.system", f"echo $$ > {pid_file}; sleep 60", timeout_s=1.0)
    wait_until_gone(int(pid_file.read_text()))


def test_pool_replaces_a_process_that_dies(pool: ProcessPool) -> None:
    with pytest.raises(PoolError, match=r"its process died during the call \(exit status 7\)"):
        run(pool, "os._exit", 7)
    with pytest.raises(PoolError, match=r"its process died during the call \(signal SIGABRT\)"):
        run(pool, "os.abort")
    assert run(pool, "operator.add", 1, 2) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_starts_again_after_a_death_between_calls(pool: ProcessPool) -> None:
    pid = run(pool, "os.getpid")
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run(pool, "operator.add", 1, 2) == 3


def test_pool_makes_a_call_once_more_whose_process_somebody_killed(pool: ProcessPool, tmp_path: Path) -> None:
    mark = tmp_path / "was_here"
    at_first = f"test -e {mark} || (touch {mark}; kill -9 $PPID; sleep 60)"  # PPID: the pool's process
    assert run(pool, "os.system", at_first) == 0 and mark.exists()
    with pytest.raises(PoolError, match=r"its process died during the call \(signal SIGKILL\)"):
        run(pool, "os.system", f"echo once more >> {tmp_path}/calls; kill -9 $PPID; sleep 60")
    assert (tmp_path / "calls").read_text().count("once more") == 2
    assert run(pool, "operator.add", 1, 2) == 3


def test_pool_names_a_function_that_does_not_import(pool: ProcessPool) -> None:
    with pytest.raises(PoolError, match="module 'no_such_module' does not import"):
        run(pool, "no_such_module.fn")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_close_ends_idle_and_busy_processes() -> None:
    pool = ProcessPool(2)

    async def close_in_the_middle() -> tuple[list[int], list[object]]:
        pids = await asyncio.gather(*(pool.run("os.getpid", (), {}, 20.0) for _ in range(2)))
        calls = [asyncio.ensure_future(pool.run("time.sleep", (60,), {}, 60.0)) for _ in range(3)]
        await asyncio.sleep(0.3)
        pool.close()
        return pids, await asyncio.gather(*calls, return_exceptions=True)

    pids, results = asyncio.run(close_in_the_middle())
    assert all(isinstance(result, PoolError) for result in results)
    assert not any(alive(pid) for pid in pids)
    pool.close()
    with pytest.raises(PoolError, match="the pool is closed"):
        run(pool, "os.getpid")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A script without a `__main__` guard, killed while its pool is busy."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import asyncio
            from rlpost.rewards.pool import ProcessPool
            async def main():
                pool = ProcessPool(1)
                print(await pool.run("os.getpid", (), {}, 20.0), flush=True)
                await pool.run("time.sleep", (60,), {}, 1.0)
            asyncio.run(main())
            """
        )
    )
    root = str(Path(__file__).parents[3])
    code = f"import sys, runpy; sys.path.insert(0, {root!r}); runpy.run_path({str(tmp_path / 'script.py')!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stderr is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)
    parent.stderr.close()
