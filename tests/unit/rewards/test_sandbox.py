"""The sandbox of code rewards: programs that try to get out of it, or to take more than they may."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.rewards.limits import MIB, CallLimits, Sandbox
from rlpost.rewards.sandbox import jail

ROOT = Path(__file__).parents[3]
LIMITS = CallLimits(timeout_s=10.0, memory_bytes=512 * MIB, max_output_bytes=MIB)
MISSING = jail._probe(Sandbox.FULL)
isolated = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox on this host: {MISSING}")

# `attempt` prints what was done; what is refused prints nothing. `syscall` is the C library's.
PRELUDE = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def attempt(name, act):
    try:
        result = act()
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        return
    print("DONE", name, result)
def syscall(*args):
    if (result := libc.syscall(*map(ctypes.c_long, args))) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""


def run(source: str, limits: CallLimits = LIMITS, stdin: str = "") -> jail.Outcome:
    return jail.run_script(PRELUDE + textwrap.dedent(source), stdin.encode(), limits)


def attempts(source: str) -> str:
    """What a program that attempts things managed, once it came to its end."""
    outcome = run(textwrap.dedent(source) + "\nprint('END')")
    assert outcome.fine, outcome
    assert outcome.output.endswith(b"END\n")
    return outcome.output.decode().removesuffix("END\n")


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file that the program must neither read nor change."""
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_text() == "secret" and sorted(tmp_path.iterdir()) == [path]
    assert (before.st_mode, before.st_mtime, before.st_uid) == (after.st_mode, after.st_mtime, after.st_uid)


def test_host_says_whether_it_has_the_sandbox() -> None:
    """Which of these tests ran for real is part of their output."""
    print(f"sandbox: {MISSING or 'Landlock, seccomp and limits; all escape attempts run'}")
    if MISSING:
        with pytest.raises(ValueError, match="reward.sandbox=full"):
            jail.check(Sandbox.FULL)
    else:
        jail.check(Sandbox.FULL)


@isolated
def test_program_reads_its_input_and_prints() -> None:
    outcome = run("print(sum(map(int, sys.stdin.read().split())))", stdin="1 2\n3\n")
    assert (outcome.output, outcome.fine) == (b"6\n", True)


@isolated
def test_program_may_use_threads_its_folder_and_an_event_loop() -> None:
    outcome = run(
        """
        import asyncio, tempfile, shutil
        thread = threading.Thread(target=lambda: open("a", "w").write("text"))
        thread.start(); thread.join()
        os.mkdir("d"); os.rename("a", "d/b"); open("d/b", "a").write("!")
        print(open("d/b").read()); shutil.rmtree("d"); tempfile.TemporaryFile().write(b"x")
        async def main():
            await asyncio.sleep(0.01)
            print("slept")
        asyncio.run(main())
        exit()
        """
    )
    assert (outcome.output, outcome.fine) == (b"text!\nslept\n", True)


@isolated
def test_fork_bomb_and_other_processes_are_refused() -> None:
    assert not attempts(
        """
        for _ in range(100):
            attempt("fork", os.fork)
        attempt("clone", lambda: syscall(56 if X86 else 220, 17, 0, 0, 0, 0))
        attempt("clone3", lambda: syscall(435, 0, 0))
        attempt("exec", lambda: os.execv(sys.executable, [sys.executable, "-c", "print('DONE exec')"]))
        attempt("system", lambda: subprocess.run(["/bin/sh", "-c", "echo DONE shell"]))
        attempt("spawn", lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "echo DONE spawn"], {}))
        """
    )


@isolated
def test_files_outside_the_folder_are_out_of_reach(secret: Path) -> None:
    assert not attempts(
        f"""
        secret, folder = {str(secret)!r}, {str(secret.parent)!r}
        attempt("read", lambda: open(secret).read())
        attempt("list", lambda: os.listdir(folder))
        attempt("list", lambda: os.listdir("/"))
        attempt("list", lambda: os.listdir(".."))
        attempt("link", lambda: os.link(secret, "mine"))
        os.symlink(secret, "link")
        attempt("symlink", lambda: open("link").read())
        for pid in ("self", os.getppid()):
            for name in ("environ", "mem", "maps", "cmdline"):
                attempt(name, lambda: open(f"/proc/{{pid}}/{{name}}", "rb").read(1))
        attempt("passwd", lambda: open("/etc/passwd").read())
        attempt("checkout", lambda: open({str(ROOT / "setup.py")!r}).read())
        attempt("shm", lambda: open("/dev/shm/rlpost", "w"))
        """
    )


@isolated
def test_nothing_outside_the_folder_can_be_changed(secret: Path) -> None:
    assert not attempts(
        f"""
        secret, new = {str(secret)!r}, {str(secret.parent / "new")!r}
        attempt("write", lambda: open(secret, "w"))
        attempt("append", lambda: open(secret, "a"))
        attempt("create", lambda: open(new, "w"))
        attempt("remove", lambda: os.remove(secret))
        attempt("mkdir", lambda: os.mkdir(new))
        attempt("truncate", lambda: os.truncate(secret, 0))
        attempt("chmod", lambda: os.chmod(secret, 0o777))
        attempt("chown", lambda: os.chown(secret, 1, 1))
        attempt("utime", lambda: os.utime(secret, (0, 0)))
        attempt("mount", lambda: syscall(165 if X86 else 40, 0, 0, 0, 0, 0))
        open("mine", "w").write("x")
        attempt("rename", lambda: os.rename("mine", new))
        attempt("rename over", lambda: os.rename("mine", secret))
        attempt("library", lambda: os.open(os.__file__, os.O_RDONLY | os.O_TRUNC))
        attempt("library", lambda: os.open(os.__file__, os.O_RDWR))
        """
    )


@isolated
def test_network_is_out_of_reach(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "s"))
        local.listen()
        assert not attempts(
            f"""
            attempt("tcp", lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 1))
            attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect({str(tmp_path / "s")!r}))
            attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
            attempt("datagrams", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
            attempt("inet pair", lambda: socket.socketpair(socket.AF_INET))
            attempt("io_uring", lambda: syscall(425, 8, 0))
            """
        )


@isolated
def test_other_processes_are_out_of_reach() -> None:
    assert not attempts(
        """
        import fcntl, resource
        parent = os.getppid()
        attempt("kill", lambda: os.kill(parent, 0))
        attempt("kill all", lambda: os.kill(-1, 0))
        attempt("kill group", lambda: os.killpg(0, 0))
        attempt("owner", lambda: fcntl.fcntl(0, fcntl.F_SETOWN, parent))
        attempt("limits", lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1)))
        attempt("raise limits", lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2))
        attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, parent, 19))
        attempt("affinity", lambda: os.sched_setaffinity(parent, {0}))
        attempt("session", os.setsid)
        attempt("root", lambda: os.setuid(0))
        if X86:
            attempt("ptrace", lambda: syscall(101, 16, parent, 0, 0))
            attempt("memory", lambda: syscall(310, parent, 0, 0, 0, 0, 0))
            attempt("shared memory", lambda: syscall(29, 0, 4096, 0o1600))
        attempt("pidfd", lambda: syscall(434, parent, 0))
        attempt("bpf", lambda: syscall(321 if X86 else 280, 0, 0, 0))
        """
    )


def test_environment_is_not_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    limits = CallLimits(timeout_s=10.0, sandbox=Sandbox.LIMITS)
    assert b"secret" not in run("print(os.environ)", limits).output


MODES = [pytest.param(Sandbox.FULL, marks=isolated), Sandbox.LIMITS]


@pytest.mark.parametrize("sandbox", MODES)
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "for number in set(signal.Signals) - {9, 19, 32, 33}:\n    try: signal.signal(number, lambda *_: None)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        "threading.Thread(target=lambda: time.sleep(60)).start()",
        "os.close(1); time.sleep(60)",
    ],
    ids=["loop", "handlers", "thread left", "closed output"],
)
def test_time_is_up_at_its_limit(source: str, sandbox: Sandbox) -> None:
    start = time.monotonic()
    outcome = run(source, CallLimits(timeout_s=0.5, sandbox=sandbox))
    assert (outcome.timed_out, outcome.fine) == (True, False)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("sandbox", MODES)
@pytest.mark.parametrize(
    "source",
    [
        "held = bytearray(2**30)",
        "held = []\nwhile True: held.append(bytearray(2**20))",
        "while True: print('x' * 1000)",
        "while True: os.write(1, b'x' * 1000)",
        "open('big', 'w').write('x' * 2**21)",
        "print(1); sys.exit(3)",
        "print(1); os.abort()",
        "print(1); ctypes.string_at(0)",
        "def f(): f()\nf()",
    ],
    ids=["memory", "memory bit by bit", "prints", "writes", "file", "status", "abort", "segfault", "recursion"],
)
def test_taking_too_much_or_crashing_is_no_success(source: str, sandbox: Sandbox) -> None:
    outcome = run(source, CallLimits(timeout_s=20.0, memory_bytes=256 * MIB, max_output_bytes=MIB, sandbox=sandbox))
    assert (outcome.fine, outcome.timed_out) == (False, False) and len(outcome.output) <= MIB


@pytest.mark.parametrize("sandbox", MODES)
@pytest.mark.parametrize(
    "source",
    [
        "for _ in range(200): threading.Thread(target=time.sleep, args=(60,)).start()",
        "for i in range(10**6): open(str(i), 'w').write('x')",
        "for i in range(10**6): open(str(i), 'w').write('x' * 500_000)",
    ],
    ids=["threads", "many files", "large files"],
)
def test_threads_and_files_are_limited(source: str, sandbox: Sandbox) -> None:
    outcome = run(source, CallLimits(timeout_s=30.0, max_output_bytes=MIB, sandbox=sandbox))
    assert (outcome.fine, outcome.timed_out) == (False, False)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    limits = CallLimits(timeout_s=0.5, sandbox=Sandbox.LIMITS)
    source = "print(subprocess.Popen(['sleep', '60']).pid, flush=True); open('f', 'w').write('x'); time.sleep(60)"
    pid = int(run(source, limits).output)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_limits_alone_are_told_apart_from_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial program finds its way out where there is nothing but limits, and `full` is then refused."""
    open_host = jail.run_script(jail._PROBE, b"", CallLimits(timeout_s=10.0, sandbox=Sandbox.LIMITS))
    assert {"files", "processes"} <= set(open_host.output.decode().split())
    monkeypatch.setattr(jail, "run_script", lambda *_: open_host)
    jail._probe.cache_clear()
    try:
        with pytest.raises(ValueError, match="reward.sandbox=full: .*a trial program could reach: files.*=limits runs"):
            jail.check(Sandbox.FULL)
        jail.check(Sandbox.LIMITS)
        assert "can read your files" in caplog.text
    finally:
        jail._probe.cache_clear()


@isolated
def test_kernel_without_landlock_is_refused() -> None:
    """A host whose profile forbids Landlock, as older containers' do; it is made with seccomp."""
    code = """
        import errno
        from rlpost.rewards.limits import Sandbox
        from rlpost.rewards.sandbox import jail, seccomp
        library = seccomp.load()
        context = library.seccomp_init(0x7FFF0000)
        assert library.seccomp_rule_add_array(context, 0x00050000 | errno.ENOSYS, 444, 0, None) == 0
        assert library.seccomp_load(context) == 0
        jail.check(Sandbox.LIMITS)
        jail.check(Sandbox.FULL)
        """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "ValueError: reward.sandbox=full: this host cannot shut the model's code in: it did not start" in done.stderr
    assert "Landlock" in done.stderr


def test_sandbox_that_does_not_start_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(jail.SandboxError, match="it did not start"):
        run("print(1)")
