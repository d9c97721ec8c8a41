"""The process that shuts itself in and then runs code that nobody trusts.

Started with the standard library alone on its path, since each test pays for what is imported here.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import site
import sys
from typing import Any

from rlpost.rewards.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION_3 = 0x20080522


def main() -> None:
    """Shut this process in as `sys.argv[1]` (JSON, see `jail.py`) says, tell so, and run what it is to run."""
    spec = json.loads(sys.argv[1])
    from rlpost.rewards.sandbox import remote  # the last import of ours: afterwards the files are out of reach

    os.chdir(spec["folder"])
    _limit(spec)
    libc = ctypes.CDLL(None, use_errno=True)
    library = seccomp.load() if spec["isolate"] else None
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        sys.exit("the process that asked for this is gone")
    if library is not None:
        _drop_privileges(libc)
        landlock.restrict(libc, spec["readable"], spec["folder"])
        seccomp.restrict(library)
    sys.path[:] = spec["path"]
    sys.argv[:] = ["main.py"]
    site.setquit()  # `exit()`, which programs use and -S leaves out
    os.write(spec["ready_fd"], b"\n")
    os.close(spec["ready_fd"])
    with open("main.py", encoding="utf-8") as file:
        source = file.read()
    scope = vars(sys.modules["__main__"])
    scope.clear()
    scope.update(__name__="__main__", __builtins__=builtins, __file__="main.py")
    if spec["role"] == "script":
        exec(compile(source, "main.py", "exec"), scope)
    elif spec["role"] == "candidate":
        _silence()
        requests, replies = remote.open_ends(spec)
        scope["__name__"] = "solution"
        exec(compile(source, "main.py", "exec"), scope)
        remote.serve(scope, requests, replies)
    else:
        verdict_fd = os.dup(1)
        _silence()
        replies, requests = remote.open_ends(spec)
        verdict = remote.test(source, scope, remote.Peer(requests, replies, spec["max_output_bytes"]))
        os.write(verdict_fd, json.dumps(verdict).encode())


def _limit(spec: dict[str, Any]) -> None:
    """The kernel's limits on this process, for good."""
    limits = {
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_FSIZE: spec["max_output_bytes"],
        resource.RLIMIT_NOFILE: spec["max_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, limit in limits.items():
        if limit is not None:
            _, hard = resource.getrlimit(name)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(name, (limit, limit))


def _drop_privileges(libc: ctypes.CDLL) -> None:
    """Give up root's capabilities, which lift limits, and every way to get them back."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) < 0:
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _silence() -> None:
    """What is printed from here on goes nowhere."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
