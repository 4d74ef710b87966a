"""Calls a function once certain modules are imported, however late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class ImportWatch(MetaPathFinder):
    """Calls ``imported`` after each import of one of these modules, until :meth:`end`."""

    def __init__(self, names: Iterable[str], imported: Callable[[], None]) -> None:
        self._names = frozenset(names)
        self._imported = imported
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's usual spec, whose loader calls ``imported`` at last; None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def end(self) -> None:
        """Watch no further imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
