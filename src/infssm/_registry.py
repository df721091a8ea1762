"""A registry of named objects: models, methods, distances, data sets, studies. Plugins are entry points."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

from infssm.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ConfigDict

T = TypeVar("T")


def shorten(text: str, most: int = 80) -> str:
    """Text on one line of at most ``most`` characters, for messages that repeat user input."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for a close name, else the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names) or 'none'}"


def check_options(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], config: ConfigDict | None = None
) -> dict[str, Any]:
    """Options converted to the types of a function's keyword-only parameters; ConfigError for those that do not fit.

    What a ``partial`` sets already is no option. ``config`` is pydantic's, for the conversion of values.
    """
    from pydantic import TypeAdapter, ValidationError  # here, because it takes a quarter of a second

    fixed: Collection[str] = ()
    if isinstance(function, partial):
        fixed, function = function.keywords.keys(), function.func
    parameters = inspect.signature(function).parameters
    known = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key not in fixed]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        hints = {}
    checked = {}
    for key, value in options.items():
        if key not in known and not takes_any:
            raise ConfigError(f"{what} has no option {shorten(repr(key))}{suggest(key, known)}")
        try:
            checked[key] = TypeAdapter(hints.get(key, Any), config=config).validate_python(value)
        except ValidationError as error:
            reason = shorten(error.errors()[0]["msg"])
            raise ConfigError(f"{what}: {key}={shorten(repr(value))}: {reason}") from None
    return checked


def load_plugins(group: str, known: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Name and object of every entry point of ``group`` that is not ``known`` yet.

    A plugin that fails to import is left out with a warning: a broken package must not stop everything else.
    """
    for point in entry_points(group=group):
        if point.name in known:
            continue
        try:
            loaded = point.load()
        except Exception as error:
            reason = shorten(f"{type(error).__name__}: {error}", 200)
            warnings.warn(
                f"plugin {point.name!r} ({group}, {point.value}) cannot be imported and is left out: {reason}",
                stacklevel=2,
            )
        else:
            yield point.name, loaded


class Registry(Generic[T]):
    """A named collection that rejects duplicates and suggests close names.

    ``group`` names the entry-point group through which installed packages add their own entries.
    """

    def __init__(self, what: str, group: str | None = None) -> None:
        self.what = what
        self._items: dict[str, T] = {}
        self._group = group

    def register(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under ``name``."""

        def add(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.what} {name!r} is registered already")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            self._load_entry_points()
        if name not in self._items:
            raise ConfigError(f"unknown {self.what} {shorten(repr(name))}{suggest(name, self._items)}")
        return self._items[name]

    def describe(self, name: str) -> str:
        """The first line of the docstring of a registered object."""
        return (self[name].__doc__ or "").strip().partition("\n")[0]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(sorted(self._items))

    def _load_entry_points(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        for name, item in load_plugins(group, self._items):
            self._items[name] = item
