"""Keys below maps that take any name, such as `rollout.engine_kwargs`, as they are typed and as Hydra takes them.

Hydra refuses a name that is not there yet, or wants a `+`; and it makes no reward term of a name. The maps are found by
the types of the schema's fields.
"""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass

from rlpost.config import named, opened

_WORD = re.compile(r"\+{0,2}(?P<key>\w[^\s=\[\]]*)=(?P<value>.*)", re.DOTALL)


def hydra_words(words: Sequence[str]) -> list[str]:
    """A command line as Hydra takes it; flags and other keys stay as they are, and so does what this returns.

    A key below a map of any name, and such a map as a whole, gets `++`. Reward terms come after a word that makes them,
    `+reward.terms={style:{}}`; their keys get no plus, so that Hydra refuses a wrong one. Where any type will do, a
    list or map comes after a word that sets null: it takes the place of what was there.
    Of the words with the same key and as many plus signs a sweep keeps the last: hence the differences.
    """
    made = _made(words)
    result: list[str] = []
    for word in words:
        if word in made.values():
            continue
        match = _WORD.fullmatch(word)
        if match is None or not opened(match["key"]):
            result.append(word)
            continue
        thing = named(match["key"])
        if thing and made[thing[0]] not in result:
            result.append(made[thing[0]])
        new = _one(match["key"], match["value"])
        result += new[1:] if new[0] in result[-1:] else new
    return result


def _one(key: str, value: str) -> list[str]:
    """The words for a key that is or lies below one of `open_keys`; of two words the first makes room."""
    at, item = list(opened(key).items())[-1]
    if item is None and key == at:
        return [f"{key}=null", f"++{key}={value}"] if "[" in value or "{" in value else [f"{key}={value}"]
    is_of_schema = is_dataclass(item) and key.count(".") > at.count(".") + 1  # at.name.key
    return [f"{'' if is_of_schema else '++'}{key}={value}"]


def _made(words: Sequence[str]) -> dict[str, str]:
    """Map of typed things, `reward.terms` -> the word that makes those that `words` name."""
    names: dict[str, list[str]] = {}
    for match in filter(None, map(_WORD.fullmatch, words)):
        if thing := named(match["key"]):
            names.setdefault(thing[0], []).append(f"{thing[1]}:{{}}")
    return {at: f"+{at}={{{','.join(dict.fromkeys(items))}}}" for at, items in names.items()}


def below_any(words: Sequence[str]) -> dict[str, str]:
    """Of `words` those that lie below a value of any type, which may be no map: word -> key of that value."""
    found: dict[str, str] = {}
    for match in filter(None, map(_WORD.fullmatch, words)):
        for at, item in opened(match["key"]).items():
            if item is None and at != match["key"]:
                found[match[0]] = at
    return found
