"""Named things a config can choose: unique names, helpful misses, and dotted paths for the user's own."""

import difflib
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_FILE = re.compile(r"(?P<file>.*/.*?|.*\.py)(:(?P<name>\w+))?")


def near(name: str, known: Iterable[str]) -> str:
    """`"did you mean 'a' or 'b'?"`, or the known names when none is near; never empty."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
    return "known: " + (", ".join(known) or "none")


def load_dotted(path: str, key: str) -> Any:
    """Import `package.module.name`.

    Args:
        path: dotted path of a class, function or other attribute.
        key: the config key it came from, for the message.

    Raises:
        ValueError: a file, or a module that does not import or lacks the attribute; says which, and the original error.
    """
    if file := _FILE.fullmatch(path):
        wanted = f"{PurePath(file['file']).stem}.{file['name'] or 'my_function'}"
        raise ValueError(
            f"{key}={path}: expected module and name, not a file: write {key}={wanted}, and start in the file's folder "
            "or put it on PYTHONPATH"
        )
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{key}={path}: expected a dotted path such as 'my_package.my_module.my_function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key}={path}: module '{module_name}' does not import ({type(error).__name__}: {error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{key}={path}: module '{module_name}' has no '{attribute}'; {near(attribute, names)}")
    return getattr(module, attribute)


class Registry(Generic[T]):
    """Unique names for one kind of thing (`kind` appears in messages).

    `modules` are imported on the first look-up, so that a name can be registered where its code lives and no
    import of the registry pays for all of them; a module that fails to import is named in the message of a miss.
    """

    def __init__(self, kind: str, modules: Iterable[str] = ()):
        self.kind = kind
        self._modules = list(modules)
        self._items: dict[str, T] = {}
        self._failed: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: file the decorated function or class under `name`. A second use of a name is an error."""

        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} '{name}' is registered twice: {self._items[name]!r} and {item!r}")
            self._items[name] = item
            return item

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._items)

    def get(self, name: str, key: str | None = None) -> T:
        """The thing called `name`; `key` is the config key that named it.

        Raises:
            ValueError: unknown name; lists near names and the modules that failed to import.
        """
        self._load()
        if name in self._items:
            return self._items[name]
        failed = "".join(f"; {module} did not import: {why}" for module, why in self._failed.items())
        raise ValueError(f"{key or self.kind}={name}: no such {self.kind}; {near(name, self._items)}{failed}")

    def _load(self) -> None:
        while self._modules:
            module = self._modules.pop()
            try:
                importlib.import_module(module)
            except ImportError as error:
                self._failed[module] = str(error)
