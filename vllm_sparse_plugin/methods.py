"""Classes of methods by name: those of this package, and those that other packages announce as entry points."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from vllm_sparse_plugin.errors import ConfigurationError


class _Named(Protocol):
    @classmethod
    def name(cls) -> str: ...


T = TypeVar("T", bound=_Named)
C = TypeVar("C", bound=type[Any])


class Methods(Generic[T]):
    """The classes of one kind of method. An entry point is imported when a configuration names it, not before."""

    def __init__(self, group: str, base: type[T]) -> None:
        """Begins without classes.

        Args:
            group: the group of entry points. Each is called like its class: `NAME = "package.module:Class"`.
            base: the class that all classes derive from.
        """
        self.group = group
        self._base = base
        self._built_in: dict[str, type[T]] = {}

    def __iter__(self) -> Iterator[type[T]]:
        """Yields the classes of this package."""
        return iter(self._built_in.values())

    def built_in(self, cls: C) -> C:
        """Adds a class of this package, as a decorator."""
        self._built_in[cls.name()] = cls
        return cls

    def import_folder(self, package: str, path: list[str]) -> None:
        """Imports every module of a package, so that each adds its class."""
        for module in pkgutil.iter_modules(path):
            import_module(f"{package}.{module.name}")

    def names(self) -> list[str]:
        """Returns the names of all classes, sorted. It imports none."""
        return sorted({*self._built_in, *(point.name for point in _announced(self.group))})

    def find(self, name: str) -> type[T] | None:
        """Returns the class of a name; None if no package has one.

        Raises:
            ConfigurationError: if several packages have one, or if the entry point is broken.
        """
        points = [point for point in _announced(self.group) if point.name == name]
        if not points:
            return self._built_in.get(name)
        if len(points) > 1 or name in self._built_in:
            owners = " and ".join(sorted(map(_owner, points)) + ["vllm-sparse-plugin"] * (name in self._built_in))
            raise ConfigurationError(f"entry point {self.group}: got {name!r} from {owners}, allowed: one of them")
        return self._load(points[0])

    def _load(self, point: EntryPoint) -> type[T]:
        got = f"{point.value!r} of {_owner(point)}"
        allowed = f"a subclass of {self._base.__module__}.{self._base.__name__}"
        try:
            found = point.load()
        except Exception as error:  # a module of another package may raise anything
            got += f", which does not load ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            raise ConfigurationError(f"entry point {self.group}: got {got}, allowed: {allowed}") from None
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigurationError(f"entry point {self.group}: got {got}, allowed: {allowed}")
        if found.name() != point.name:
            allowed = f"{found.name()!r}, the name in the class"
            raise ConfigurationError(f"entry point {self.group}: got {point.name!r} for {got}, allowed: {allowed}")
        return found


@functools.cache
def _announced(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _owner(point: EntryPoint) -> str:
    """Returns the name of the distribution that announces an entry point."""
    return str(point.dist.name) if point.dist else "an unnamed package"
