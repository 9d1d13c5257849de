"""Import a few modules of a large package without importing the rest of it.

A serving engine's cache manager needs a dozen of its package's files, yet importing it the usual way imports GPU kernels, model
code and hundreds of dependencies.  Here the named modules are loaded from the package's folder, and every other module of the
package is a stand-in: whatever is imported from it is a falsy object that can be called, subclassed, subscripted and used as a
decorator, which is all that code at module level asks of names that are never used afterwards.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _NothingType(type):
    """Makes a class of nothing as permissive as its instances."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(cls, _: object) -> type[Nothing]:
        return Nothing

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Nothing and len(args) == 1 and not kwargs and isinstance(args[0], type | type(_decorated)):
            return args[0]  # used as a decorator
        return super().__call__(*args, **kwargs)


class Nothing(metaclass=_NothingType):
    """What a stand-in module has under every name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _decorated(args[0]) if len(args) == 1 and not kwargs and callable(args[0]) else Nothing()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _decorated(function: Any) -> Any:
    return function


class _StandIn(ModuleType):
    """A module of which every name is :class:`Nothing`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str, folder: Path, real: frozenset[str]) -> None:
        self.package = package
        self.folder = folder
        self.real = real

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        if fullname not in self.real:
            return ModuleSpec(fullname, self, is_package=True)
        place = self.folder.joinpath(*fullname.split("."))
        if place.is_dir():
            return importlib.util.spec_from_file_location(fullname, place / "__init__.py", submodule_search_locations=[str(place)])
        return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def import_only(package: str, folder: Path, real: Sequence[str]) -> list[ModuleType]:
    """Import the modules ``real`` of ``package`` from ``folder``, the rest of the package being stand-ins; return them in order.

    ``folder`` is what a wheel of the package was unpacked to, and may hold small dependencies too: it is put at the end of
    ``sys.path``.  For a process of its own: the stand-ins stay.

    Raises
    ------
    ValueError
        The package was imported before, or ``folder`` does not hold a module of ``real``.
    ImportError
        A module needs something of another package that is not installed.
    """
    if package in sys.modules:
        raise ValueError(f"{package} was imported before; stand-ins would mix with it")
    for name in real:
        place = folder.joinpath(*name.split("."))
        if not place.is_dir() and not place.with_suffix(".py").is_file():
            raise ValueError(f"{folder} is no unpacked {package} wheel of a version we know: there is no {place}[.py]")
    sys.path.append(str(folder))
    sys.meta_path.insert(0, _Finder(package, folder, frozenset(real)))
    return [importlib.import_module(name) for name in real]
