"""Tests and the code that they test, in two processes: only plain values pass between them.

The tests never share an interpreter with the code under test, so it cannot reach their verdict: not by ending the
process, not by patching builtins, not by values that claim to equal anything. What it returns arrives as `None`, bool,
number, text, bytes, list, tuple, set or dict; anything else as a `Remote`, which has methods and can be iterated.
"""

import builtins
import json
import symtable
import sys
from collections.abc import Callable, Iterator
from io import TextIOBase
from itertools import islice
from typing import Any

MAX_ITEMS = 1_000_000  # taken from an iterator that may be endless
_PLAIN = (bool, int, float, str)
_TAGS = {"tuple": tuple, "set": set, "frozenset": frozenset}


class RemoteError(Exception):
    """The code under test raised an exception of its own, or is gone."""


class Unsupported(Exception):
    """A test hands the code something that cannot travel, or does not test it."""


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """`value` for JSON; `refer` numbers what is not plain."""
    if value is None:
        return None
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    for tag, kind in _TAGS.items():
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), refer)
    return {"object": refer(value)}


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """Inverse of `encode`; `find` has what `refer` numbered."""
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "object":
        return find(content)
    return _TAGS[tag](decode(item, find) for item in content)


class Remote:
    """An object of the code under test. It equals only itself: its own `__eq__` is not asked."""

    def __init__(self, peer: "Peer", number: int):
        self._peer, self._number = peer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask(call=self._number, args=args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `copy`, `unittest` and others look for
            raise AttributeError(name)
        return self._peer.ask(attribute=self._number, name=name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._peer.ask(items=self._number))


class Peer:
    """The tests' end: asks the code under test, and raises here what was raised there."""

    def __init__(self, requests: TextIOBase, replies: TextIOBase, max_chars: int):
        self._requests, self._replies, self._max_chars = requests, replies, max_chars

    def ask(self, **request: Any) -> Any:
        """The result of a request.

        Raises:
            RemoteError: an exception that is no builtin one, or no answer.
        """
        request = {key: encode(value, self._number) for key, value in request.items()}
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._replies.readline(self._max_chars)
            reply = json.loads(line)
            if "value" in reply:
                return decode(reply["value"], lambda number: Remote(self, number))
            name, message = str(reply["error"]), str(reply["message"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
            raise RemoteError(f"the code gave no answer ({type(error).__name__}: {error})") from None
        raise _error(name)(message)

    def _number(self, value: Any) -> int:
        if not isinstance(value, Remote):
            raise Unsupported(f"a test passes a {type(value).__name__} to the code: only plain values travel")
        return value._number


def _error(name: str) -> type[Exception]:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteError
    # in `all(map(...))` StopIteration would end the test's own loop as if all were well
    return RemoteError if issubclass(kind, StopIteration | StopAsyncIteration) else kind


def serve(scope: dict[str, Any], requests: TextIOBase, replies: TextIOBase) -> None:
    """The code's end: answer requests about what `scope` holds until they end."""
    objects: list[Any] = []

    def number(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(request: dict[str, Any]) -> Any:
        if "get" in request:
            if request["get"] not in scope:
                raise NameError(f"name '{request['get']}' is not defined")
            return scope[request["get"]]
        if "call" in request:
            kwargs = decode(request["kwargs"], objects.__getitem__)
            return objects[request["call"]](*decode(request["args"], objects.__getitem__), **kwargs)
        if "attribute" in request:
            return getattr(objects[request["attribute"]], request["name"])
        return list(islice(objects[request["items"]], MAX_ITEMS))

    for line in requests:
        try:
            text = json.dumps({"value": encode(answer(json.loads(line)), number)})
        except Exception as error:  # whatever the code raises is the test's to judge
            text = json.dumps({"error": type(error).__name__, "message": str(error)})
        replies.write(text + "\n")
        replies.flush()


def free_names(source: str) -> set[str]:
    """Names that `source` uses but neither defines nor imports, builtins aside: those of the code under test."""
    top = symtable.symtable(source, "tests", "exec")
    names: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    return {name for name in names - bound - set(dir(builtins)) if not name.startswith("__")}


def test(source: str, scope: dict[str, Any], peer: Peer) -> dict[str, str]:
    """Run the tests in `source` to their end: `{}` if all is well, else what is not as "failed" or "unsupported".

    `unittest.main()` and other ways to exit with status 0 count as their end. `__solution__("pow")` is the code's own
    `pow` and not the builtin.
    """
    scope["__solution__"] = lambda name: peer.ask(get=name)
    try:
        names = free_names(source)
        if not names and "__solution__" not in source:
            raise Unsupported(f"a test uses nothing that the code defines: {source[:80]!r}")
        for name in sorted(names):
            try:
                scope[name] = peer.ask(get=name)
            except NameError:
                pass  # as it is for the test
        exec(compile(source, "tests", "exec"), scope)
    except SystemExit as end:
        return {"failed": f"exit status {end.code}"} if end.code else {}
    except Unsupported as error:
        return {"unsupported": str(error)}
    except Exception as error:  # a failed assertion, or whatever else the test raises
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return {}


def open_ends(spec: dict[str, Any]) -> tuple[TextIOBase, TextIOBase]:
    """The connection of this process as text files: what it reads and what it writes."""
    sys.set_int_max_str_digits(0)
    return open(spec["read_fd"], encoding="ascii"), open(spec["write_fd"], "w", encoding="ascii")
