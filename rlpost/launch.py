"""How every command starts: check the command line, compose, run, and end with a status that says how it went.

0 finished; 1 the run failed; 2 the configuration is wrong; 70 it stalled; 75 SIGTERM, and resumable; 130 Ctrl-C.
Tabled in docs/reliability.md.
"""

import asyncio
import json
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlpost.config import CONFIG_DIR, Config, register, to_object
from rlpost.endings import (
    CONFIG_ERROR,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RESUMABLE,
    STALLED,
    Preempted,
    Stalled,
    described,
)
from rlpost.files import MAKE_ROOM, DiskFull, chain, is_disk_full, set_aside
from rlpost.host import exported, exported_while
from rlpost.lock import InUse, holding
from rlpost.open_keys import hydra_words
from rlpost.overrides import check_overrides, check_stated
from rlpost.redact import redact_files, redact_text

VALUE_FLAGS = {"--cfg", "-c", "--package", "-p", "--info", "-i"}  # the next word is theirs, not an override
OTHER_CONFIG = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun"}
ERROR = "error.txt"
HYDRA_RAISES = "HYDRA_FULL_ERROR"  # rather than printing a trace and exiting with 1
HELP = {"--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc"}

Execute = Callable[[Config, Path], dict[str, Any]]


class RunFailed(CompactHydraException):  # Hydra reports these without a trace
    """One job of a multirun failed; its own message was printed when it happened."""


def launch(execute: Execute) -> None:
    """Run the command line's configuration, or each of a multirun's, through `execute(config, run_dir)`.

    `execute` returns the summary, printed as JSON on the last line of standard output; in it `finished: false` means
    interrupted, by `stopped_by`, and `passed: false` that what was to be checked is not so (exit status 1).
    """
    register()
    args = sys.argv[1:]
    if not {arg.partition("=")[0] for arg in args} & (HELP | OTHER_CONFIG):
        overrides = [
            a
            for before, a in zip(["", *args], args, strict=False)
            if not a.startswith("-") and before not in VALUE_FLAGS
        ]
        wrong = check_overrides(overrides)
        if wrong:
            print(f"rlpost: the configuration is wrong\n{wrong}", file=sys.stderr)
            sys.exit(CONFIG_ERROR)
    sys.argv[1:] = hydra_words(args)

    @hydra.main(config_path=str(CONFIG_DIR), config_name="config", version_base="1.3")
    def job(cfg: DictConfig) -> None:
        hydra_cfg = HydraConfig.get()
        redact_files(_saved_by_hydra(hydra_cfg))
        with exported_while(**{HYDRA_RAISES: asked}):  # to commands that the run starts
            status = run(cfg, Path(hydra_cfg.runtime.output_dir), execute, hydra_cfg)
        if status in (INTERRUPTED, FAILED) and terminated:  # a scheduler may end our other processes as well
            status = RESUMABLE
        ended = status in (INTERRUPTED, RESUMABLE)  # from outside, which ends a multirun as well
        if status and not ended and hydra_cfg.mode == RunMode.MULTIRUN:  # Hydra goes on, then exits non-zero
            raise RunFailed(f"exit status {status}, see above and {hydra_cfg.runtime.output_dir}")
        if status:
            sys.exit(status)

    asked = exported().get(HYDRA_RAISES, "0")
    terminated: list[int] = []

    def on_sigterm(number: int, frame: object) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)  # both end what was started

    signal.signal(signal.SIGTERM, on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts with &: SIGTERM would be lost
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _report_hydra(job)
    except KeyboardInterrupt:
        sys.exit(RESUMABLE if terminated else INTERRUPTED)


def _report_hydra(job: Callable[[], None]) -> None:
    """Run Hydra's `job`; what is wrong with a command line or a folder becomes a message, and the exit status."""
    if exported().get(HYDRA_RAISES) == "1":  # the user wants all of it
        return job()
    try:
        with exported_while(**{HYDRA_RAISES: "1"}):
            job()
    except CompactHydraException as error:
        print(error, file=sys.stderr)
        if isinstance(error.__cause__, OmegaConfBaseException):
            print(error.__cause__, file=sys.stderr)
        sys.exit(FAILED)
    except Exception as error:
        cause = next((one for one in chain(error) if isinstance(one, OSError)), None)
        if cause is None:
            raise
        if is_disk_full(cause):
            print(f"rlpost: the disk is full ({cause}). {MAKE_ROOM}", file=sys.stderr)
            sys.exit(FAILED)
        choose = "choose another with hydra.run.dir (a sweep: hydra.sweep.dir)"
        print(f"rlpost: the run folder cannot be used ({cause}): {choose}", file=sys.stderr)
        sys.exit(CONFIG_ERROR)


def _saved_by_hydra(cfg: HydraConf) -> list[Path]:
    """The config and the command line, as Hydra keeps them."""
    folder = Path(cfg.runtime.output_dir)
    names = ("config", "overrides", "hydra")
    return [folder / (cfg.output_subdir or "") / f"{name}.yaml" for name in names] + [
        Path(cfg.sweep.dir) / "multirun.yaml"
    ]


def run(cfg: DictConfig, run_dir: Path, execute: Execute, hydra_cfg: HydraConf | None = None) -> int:
    """Run one configuration in `run_dir`; returns the exit status. `hydra_cfg` says how it was composed, if it was.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        with holding(run_dir):
            set_aside(run_dir / ERROR)
            return _run(cfg, run_dir, execute, hydra_cfg)
    except InUse as error:  # the folder is the other run's: no trace is left there
        print(f"rlpost: {error}", file=sys.stderr)
        return CONFIG_ERROR


def _run(cfg: DictConfig, run_dir: Path, execute: Execute, hydra_cfg: HydraConf | None) -> int:
    try:
        typed = to_object(cfg)
        if hydra_cfg is not None:
            check_stated(typed, hydra_cfg)
        summary = execute(typed, run_dir)
    except ValueError as error:  # a mistake in the config, as a rule: its message says all, the trace is to be sure
        _tell(str(error), run_dir)
        return CONFIG_ERROR
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("rlpost: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (Stalled, Preempted) as ended:
        _tell(str(ended), run_dir)  # the trace is also of what it may hide
        return STALLED if isinstance(ended, Stalled) else RESUMABLE
    except SystemExit as error:  # of the user's code, say: it would pass for success
        _tell(f"something called sys.exit({error.code!r}) before the run had ended", run_dir)
        return FAILED
    except Exception as error:  # the process edge: say what happened, keep the trace, exit non-zero
        full = is_disk_full(error) and not isinstance(error, DiskFull)
        _tell(f"the disk is full ({described(error)}). {MAKE_ROOM}" if full else described(error), run_dir)
        return FAILED
    print(json.dumps(summary), flush=True)
    if not summary.get("finished", True):
        return RESUMABLE if summary.get("stopped_by") == "SIGTERM" else INTERRUPTED
    return FINISHED if summary.get("passed", True) else FAILED


def _tell(message: str, run_dir: Path) -> None:
    """Print how the run ended, and keep the trace of the present error, without secrets: here if not in its folder."""
    trace, path = redact_text(traceback.format_exc()), run_dir / ERROR
    try:
        path.write_text(trace)
        kept = f"(full trace: {path})"
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # half a trace
        kept = f"(full trace, since {path} cannot be written: {error})\n{trace.rstrip()}"
    print(f"rlpost: {message}\n{kept}", file=sys.stderr)
