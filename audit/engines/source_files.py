"""The installed vLLM's classes, read from its source files without importing them.

Importing vLLM's scheduler imports torch and takes many seconds. Names of methods, their parameters and the
fields of a struct can be read from the syntax trees in a fraction of a second. :func:`read` returns None if
a file or a base class is not where known releases have it; then only an import can tell.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "vllm"

Methods = dict[str, Callable[..., None]]


class HostSource(NamedTuple):
    """What comparing signatures needs of an installed vLLM."""

    version: str
    scheduler: Any
    """An object with the methods of the scheduler, its cache manager and a connector; they do nothing."""
    output_fields: tuple[str, ...]
    """The fields of ``EngineCoreOutput``; () for v0."""
    has_scheduler_seam: bool
    """Whether ``SchedulerConfig`` has the method that the plugin wraps."""


class _Unreadable(Exception):
    """A class is not where known releases have it."""


def read() -> HostSource | None:
    """The installed vLLM; None if its files do not tell. Raises ModuleNotFoundError if there is none."""
    spec = find_spec(PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    if spec.origin is None:  # a folder of that name, no package
        return None
    try:
        return _read(_Sources(Path(spec.origin).parent.parent))
    except (OSError, SyntaxError, ValueError, _Unreadable):
        return None


class CacheDeclarations(NamedTuple):
    """How vLLM declares its KV caches. ``specs``: the classes of groups of KV caches."""

    strides: bool
    specs: tuple[str, ...]


_ABSTRACT_SPECS = ("AttentionSpec", "KVCacheSpec", "KVCacheGroupSpec")


def cache_declarations() -> CacheDeclarations | None:
    """How the installed vLLM declares its KV caches; None if its files do not tell."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    sources, module = _Sources(Path(spec.origin).parent.parent), "vllm.v1.kv_cache_interface"
    try:
        specs = [name for name in sources.classes(module) if name.endswith("Spec")]
        strides = "block_stride" in sources.fields(module, "KVCacheTensor")
    except (OSError, SyntaxError, ValueError, _Unreadable):
        return None
    return CacheDeclarations(strides, tuple(name for name in specs if name not in _ABSTRACT_SPECS))


def _read(sources: _Sources) -> HostSource:
    version = sources.version()
    if os.environ.get("VLLM_USE_V1") == "0" and sources.exists("vllm.core.scheduler"):
        scheduler = sources.instance("vllm.core.scheduler", "Scheduler")
        scheduler.block_manager = sources.instance("vllm.core.block_manager", "SelfAttnBlockSpaceManager")
        return HostSource(version, scheduler, (), False)
    scheduler = sources.instance("vllm.v1.core.sched.scheduler", "Scheduler")
    scheduler.kv_cache_manager = sources.instance("vllm.v1.core.kv_cache_manager", "KVCacheManager")
    scheduler.connector = sources.instance(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"
    )
    fields = sources.fields("vllm.v1.engine", "EngineCoreOutput")
    config = "vllm.config.scheduler"
    seam = sources.exists(config) and "get_scheduler_cls" in sources.methods(config, "SchedulerConfig")
    return HostSource(version, scheduler, fields, seam)


class _Sources:
    """Syntax trees of the modules below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, list[ast.stmt]] = {}
        """The statements of each module that was read, by its name."""

    def version(self) -> str:
        """``vllm.__version__``."""
        text = (self._folder / PACKAGE / "_version.py").read_text()
        found = re.search(r"""^__version__ = (?:version = )?["']([^"']+)["']""", text, re.MULTILINE)
        if found is None:
            raise _Unreadable("_version.py")
        return found[1]

    def exists(self, module: str) -> bool:
        return self._path(module) is not None

    def instance(self, module: str, name: str) -> Any:
        """An object of a new class that has the methods of the class ``name``."""
        return type(name, (), dict(self.methods(module, name)))()

    def fields(self, module: str, name: str) -> tuple[str, ...]:
        """The annotated fields of a struct."""
        body = self._class(module, name)[1].body
        return tuple(
            row.target.id
            for row in body
            if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
        )

    def classes(self, module: str) -> list[str]:
        """The names of the classes that a module defines."""
        return [row.name for row in self._tree(module) if isinstance(row, ast.ClassDef)]

    def methods(self, module: str, name: str) -> Methods:
        """The methods of a class and of its bases in vLLM, each with its signature."""
        module, class_ = self._class(module, name)
        found: Methods = {}
        for base in reversed(class_.bases):
            found |= self._methods_of_base(module, base)
        for row in class_.body:
            if isinstance(row, ast.FunctionDef | ast.AsyncFunctionDef):
                found[row.name] = _function(row.args)
        return found

    def _methods_of_base(self, module: str, base: ast.expr) -> Methods:
        if isinstance(base, ast.Subscript):  # of a generic class
            base = base.value
        if not isinstance(base, ast.Name):
            return {}  # such as msgspec.Struct
        try:
            return self.methods(module, base.id)
        except _Unreadable:
            if self._imported_from(module, base.id).startswith(PACKAGE):
                raise
            return {}  # such as ABC

    def _class(self, module: str, name: str) -> tuple[str, ast.ClassDef]:
        """The module that defines the class ``name`` of ``module``, and its definition."""
        for row in self._tree(module):
            if isinstance(row, ast.ClassDef) and row.name == name:
                return module, row
        origin = self._imported_from(module, name)
        if not origin.startswith(PACKAGE):
            raise _Unreadable(f"{module}.{name}")
        return self._class(origin, name)

    def _imported_from(self, module: str, name: str) -> str:
        """The module from which ``module`` imports ``name``; "" if from none."""
        for row in self._tree(module):
            if not isinstance(row, ast.ImportFrom) or row.level:
                continue
            if any(alias.name == name and alias.asname in (None, name) for alias in row.names):
                return row.module or ""
        return ""

    def _tree(self, module: str) -> list[ast.stmt]:
        if module not in self._trees:
            path = self._path(module)
            if path is None:
                raise _Unreadable(module)
            self._trees[module] = list(_statements(ast.parse(path.read_bytes()).body))
        return self._trees[module]

    def _path(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under an ``if`` or a ``try`` included."""
    for row in body:
        yield row
        for part in ("body", "orelse", "finalbody"):
            if isinstance(row, ast.If | ast.Try):
                yield from _statements(getattr(row, part, []))


def _function(arguments: ast.arguments) -> Callable[..., None]:
    """A function with these parameters that does nothing."""

    def function(*_: Any, **__: Any) -> None: ...

    function.__signature__ = Signature(list(_parameters(arguments)))  # type: ignore[attr-defined]
    return function


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    for argument in arguments.posonlyargs:
        yield Parameter(argument.arg, Parameter.POSITIONAL_ONLY)
    for argument in arguments.args:
        yield Parameter(argument.arg, Parameter.POSITIONAL_OR_KEYWORD)
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)
    for argument in arguments.kwonlyargs:
        yield Parameter(argument.arg, Parameter.KEYWORD_ONLY)
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)


# --- vLLM's classes and functions that kvledger uses without an engine.
#
# An instance made here is of use only for comparing signatures: no ``__init__`` runs, no engine starts.


def bare_scheduler() -> Any:
    """A scheduler with cache manager and connector, of use only for comparing signatures."""
    if os.environ.get("VLLM_USE_V1") == "0" and find_spec("vllm.core.scheduler") is not None:
        return _bare_v0()
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    return _bare(Scheduler, kv_cache_manager=_bare(KVCacheManager), connector=_bare(KVConnectorBase_V1))


def engine_processes() -> Any:
    """vLLM's module whose ``shutdown(procs, timeout)`` ends engine cores; None if it has no such function."""
    try:
        from vllm.v1.engine import utils
    except ImportError:
        return None
    shutdown = getattr(utils, "shutdown", None)
    if shutdown is None or list(signature(shutdown).parameters) != ["procs", "timeout"]:
        return None
    return utils


def worker_wrapper() -> Any:
    """vLLM's class that creates a worker and its KV caches."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return WorkerWrapperBase


def engine_core() -> Any:
    """vLLM's class of engine cores, if this process has imported it."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


def _bare_v0() -> Any:
    from vllm.core.block_manager import SelfAttnBlockSpaceManager
    from vllm.core.scheduler import Scheduler

    return _bare(Scheduler, block_manager=_bare(SelfAttnBlockSpaceManager))


def _bare(owner: type[Any], **attributes: Any) -> Any:
    """An instance without a call of ``__init__``; abstract classes allowed."""
    concrete = type(owner.__name__, (owner,), {"__del__": lambda self: None})
    concrete.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    instance: Any = object.__new__(concrete)
    vars(instance).update(attributes)
    return instance
