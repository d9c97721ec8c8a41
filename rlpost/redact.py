"""Secrets out of whatever is saved or shown: values of keys such as `api_key`, and passwords in addresses."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

HIDDEN = "***"
_NAMES = r"token|secret|pass(?:w(?:or)?d|phrase)?|pwd|(?:api|access|secret|private|auth|account)_?key|credentials?|auth"
_WORDS = r"(?:pad|eos|bos|unk|sep|cls|mask|image|stop)_token"  # of a vocabulary
_KEY = rf"(?!\S*\b\w*{_WORDS}\b)(?:[\w.+~-]*[_.+~-])?(?:{_NAMES})"
_IS_SECRET = re.compile(_KEY, re.IGNORECASE)
# `key=value` and `key: value`, quoted or not, in command lines and YAML
_ASSIGNED = re.compile(
    rf"(?<![\w.])(['\"]?{_KEY}['\"]?(?:=|: +))(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s,'\"{{\[\]}}]+)", re.IGNORECASE
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # user:password@host


def redact(value: Any) -> Any:
    """A config as plain containers, without its secrets; what is neither a container nor plain becomes text."""
    if isinstance(value, dict):
        return {key: HIDDEN if _hides(key, item) else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [redact(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact_text(str(value))


def redact_text(text: str) -> str:
    """A command line or YAML without its secrets."""
    return _IN_ADDRESS.sub(HIDDEN, _ASSIGNED.sub(rf"\g<1>{HIDDEN}", text))


def redact_files(paths: Iterable[Path]) -> None:
    """`redact` of whole YAML files, in place; those that hold no secret, or are not there, are left alone."""
    for path in paths:
        if path.is_file():
            before = OmegaConf.to_container(OmegaConf.load(path))
            if (clean := redact(before)) != before:
                OmegaConf.save(OmegaConf.create(clean), path)


def _hides(key: Any, value: Any) -> bool:
    """Whether a key names a secret, and there is one; numbers are none."""
    is_there = value not in (None, "") and not isinstance(value, bool | int | float)
    return is_there and _IS_SECRET.fullmatch(str(key)) is not None
