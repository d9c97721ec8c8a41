"""Is this machine fit? `python -m rlpost.tools.doctor [--json] [--engine vllm [--model PATH]]`.

A check that may crash or hang runs in a process of its own, with a time limit, and becomes a failure with what it said.
Exit status: 0 when nothing failed (warnings included), 1 when something did.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module

import psutil
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlpost.registry import near
from rlpost.tools.checks import host, versions
from rlpost.tools.checks.base import Check, Finding, Options, Status, skipped
from rlpost.workers.rollout.processes import end

STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}
AT_ONCE = 2  # child processes side by side


def late(module: str, name: str) -> Callable[[Options], Finding]:
    """A check whose module imports torch or Ray, which only the process that runs it should."""
    return lambda options: getattr(import_module(f"rlpost.tools.checks.{module}"), name)(options)


def without_gpu(options: Options) -> str:
    """Why there is nothing to ask about GPUs."""
    return "" if host.gpu_drivers() else "there is no GPU here"


def without_amd(options: Options) -> str:
    """Why there is nothing to ask about ROCm."""
    return "" if host.AMD_NODE in host.gpu_drivers() else "there is no AMD GPU here"


CHECKS = [
    Check(name="versions", run=versions.versions),
    Check(name="file descriptors", run=host.file_descriptors),
    Check(name="shared memory", run=host.shared_memory),
    Check(name="disk", run=host.disk),
    Check(name="memory", run=host.memory),
    Check(
        name="devices",
        run=late("devices", "devices"),
        timeout_s=60,
        fix="the driver hangs or torch does not load: look at nvidia-smi or amd-smi, and at dmesg",
    ),
    Check(name="visibility", run=late("devices", "visibility"), skip=without_gpu, timeout_s=60),
    Check(name="ROCm hazards", run=late("devices", "rocm_hazards"), skip=without_amd, timeout_s=60),
    Check(
        name="weights between processes",
        run=late("exchange", "ipc"),
        timeout_s=90,
        fix="processes of this user must map each other's memory: in a container add --ipc=host --cap-add=SYS_PTRACE; "
        "with PYTORCH_ALLOC_CONF=expandable_segments:True device memory cannot be shared",
    ),
    Check(
        name="collective",
        run=late("exchange", "collective"),
        timeout_s=90,
        fix="ranks do not reach each other: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to this host's interface; "
        "NCCL_DEBUG=INFO says more",
    ),
    Check(
        name="ray",
        run=late("programs", "ray_starts"),
        timeout_s=120,
        fix="look at /tmp/ray/session_latest/logs; a full /tmp, a small /dev/shm or a firewall on localhost are usual",
    ),
    Check(
        name="AITER",
        run=late("devices", "aiter"),
        skip=without_amd,
        timeout_s=300,
        fix="rebuild AITER for this GPU (docs/rocm.md)",
    ),
    Check(
        name="sleep frees memory",
        run=late("programs", "sleep"),
        skip=lambda options: "" if options.engine else "add --engine vllm (and --model PATH) to start one and see",
        timeout_s=600,
        fix="does `python -m rlpost.tools.check` with this engine start? Its message says more",
        alone=True,
    ),
]


def main(arguments: list[str] | None = None, checks: list[Check] = CHECKS) -> int:
    """The command; returns the exit status."""
    args = parse(arguments, [check.name for check in checks])
    options = Options(engine=args.engine, **({"model": args.model} if args.model else {}))
    chosen = [check for check in checks if not args.only or check.name in args.only]
    if args.child:
        answer(chosen[0], options)
        return 0
    findings = examine(chosen, options)
    if args.json:
        print(json.dumps([{"name": name, **asdict(finding)} for name, finding in findings.items()], indent=1))
    else:
        show(findings)
    return int(any(finding.status is Status.FAIL for finding in findings.values()))


def parse(arguments: list[str] | None, names: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.tools.doctor", description="Is this machine fit?")
    parser.add_argument("--json", action="store_true", help="a list of {name, status, found, fix} instead of a table")
    parser.add_argument("--only", action="append", metavar="CHECK", help=f"one of: {', '.join(names)}; may be repeated")
    parser.add_argument("--engine", help="start this rollout engine and see whether its sleep frees device memory")
    parser.add_argument("--model", help="checkpoint folder for --engine; without it a tiny one is made")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name in args.only or []:
        if name not in names:
            parser.error(f"--only '{name}': no such check; {near(name, names)}")
    return args


def examine(checks: Iterable[Check], options: Options) -> dict[str, Finding]:
    """Ask every check; findings by name, in the order of `checks`."""
    checks = list(checks)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = {c.name: pool.submit(ask, c, options) for c in checks if not c.alone}
    alone = {c.name: ask(c, options) for c in checks if c.alone}
    return {c.name: alone[c.name] if c.alone else together[c.name].result() for c in checks}


def ask(check: Check, options: Options) -> Finding:
    """One check, here or in a child process; whatever goes wrong becomes a failure."""
    if reason := check.skip(options):
        return skipped(reason)
    try:
        return check.run(options) if check.timeout_s is None else ask_child(check, options)
    except Exception as error:  # the process edge: a broken check must not hide the others
        return Finding(Status.FAIL, f"{type(error).__name__}: {error}", check.fix)


def ask_child(check: Check, options: Options) -> Finding:
    """Run `check` by this same command in a process of its own, which is ended with all that it started.

    Raises:
        RuntimeError: it crashed; its last words.
        TimeoutError: it hung.
    """
    command = [sys.executable, "-m", "rlpost.tools.doctor", "--child", "--only", check.name, "--model", options.model]
    command += ["--engine", options.engine] if options.engine else []
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=check.timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {check.timeout_s:g} s") from None
    finally:
        end_group(child)
    if child.returncode:
        raise RuntimeError(f"{ended(child.returncode)}: {last_words(err)}")
    answer = json.loads(out.splitlines()[-1])
    return Finding(Status(answer["status"]), answer["found"], answer["fix"])


def answer(check: Check, options: Options) -> None:
    """In the child process: ask in the environment that every process of a run has, and print the finding."""
    from rlpost.host import exported
    from rlpost.platform import platform

    env = platform().process_env(exported())
    if any(exported().get(name) != value for name, value in env.items()):  # drivers read it once, when they load
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**exported(), **env})
    print(json.dumps(asdict(check.run(options))))


def end_group(child: subprocess.Popen) -> None:
    """Kill the child and its whole session."""
    end(process for process in psutil.process_iter() if _session(process.pid) == child.pid)
    child.wait()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def ended(returncode: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"


def last_words(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def show(findings: dict[str, Finding]) -> None:
    """The table."""
    table = Table("check", "", Column("found, and what to do", overflow="fold"))
    for name, finding in findings.items():
        style = STYLES[finding.status]
        text = Text(finding.found)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style=style)
        table.add_row(name, Text(finding.status, style=style), text)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
