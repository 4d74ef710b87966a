"""A planted fault: one mistake that is put into the classes of an installed engine for a while.

Most faults change a few tokens in the source of one function. The changed source is compiled in the module of
the function and put in its place, on its class or in its module. The others wrap methods, because they write
wrong bytes into the KV cache. Not here: the faults themselves (table.py).
"""

from __future__ import annotations
import __future__

import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CORE = "vllm.v1.core"
PLACES = {
    "Scheduler": f"{CORE}.sched.scheduler",
    "AsyncScheduler": f"{CORE}.sched.async_scheduler",
    "KVCacheManager": f"{CORE}.kv_cache_manager",
    "BlockPool": f"{CORE}.block_pool",
    "BlockHashToBlockMap": f"{CORE}.block_pool",
    "FreeKVCacheBlockQueue": f"{CORE}.kv_cache_utils",
    "SingleTypeKVCacheManager": f"{CORE}.single_type_kv_cache_manager",
    "FullAttentionManager": f"{CORE}.single_type_kv_cache_manager",
    "SlidingWindowManager": f"{CORE}.single_type_kv_cache_manager",
    "MambaManager": f"{CORE}.single_type_kv_cache_manager",
    "HybridKVCacheCoordinator": f"{CORE}.kv_cache_coordinator",
    "KVCacheCoordinator": f"{CORE}.kv_cache_coordinator",
    "Request": "vllm.v1.request",
    "kv_cache_utils": f"{CORE}.kv_cache_utils",
    "utils": f"{CORE}.sched.utils",
    "ExampleConnector": "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "Req": "sglang.srt.managers.schedule_batch",
}
"""The module of each class, and of the functions that belong to none."""

Wrap = Callable[[Any, str, Callable[[Any], Any]], None]
"""``wrap(owner, name, make)`` puts ``make(original)`` in the place of ``owner.name``."""


class NotFound(Exception):
    """The installed engine does not have the code that a fault changes."""


@dataclass(frozen=True)
class Change:
    """Tokens in the source of one function, and what replaces them."""

    where: str
    """Class and method, or module and function, of PLACES."""
    old: str
    """The tokens that are replaced."""
    new: str
    """What replaces them. Further lines are indented as the line on which the tokens stand."""
    place: int = 0
    """Which occurrence of ``old`` is replaced, from 1; 0 if there is one only."""

    def changed(self, source: str) -> str:
        """The source of the function with the change. Raises NotFound."""
        parts = source.split(self.old)
        if len(parts) < 2 or (self.place == 0 and len(parts) != 2) or len(parts) <= self.place:
            raise NotFound(f"{len(parts) - 1} times {self.old!r} in {self.where}")
        place = self.place or 1
        before = self.old.join(parts[:place])
        line = before.rpartition("\n")[2]
        indent = line[: len(line) - len(line.lstrip())]
        new = self.new.replace("\n", f"\n{indent}") if not self.old.endswith("\n") else self.new
        return before + new + self.old.join(parts[place:])


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """One fault. It stands in the table once; demo, proofs and tests take it from there by its name."""

    name: str
    kind: str
    """What sort of mistake it is."""
    says: str
    """What the engine does wrong, as a sentence without its full stop."""
    code: tuple[Change, ...] = ()
    """What is changed. Without code and ``write`` the release itself has the fault."""
    write: Callable[[Wrap], None] | None = None
    """Wraps methods so that they write wrong bytes."""
    finds: tuple[str, ...] = ()
    """The invariants that find it; none if the audit does not."""
    why: str = ""
    """If nothing finds it: why not."""
    release: str = "0.32.0"
    """The release into which it is put."""
    link: str = ""
    """Upstream's report of the fault, or the fix that it reverts."""
    known: str = ""
    """The fault of released engines that it puts back, by its id in the catalogue."""

    @property
    def level(self) -> str:
        """The lowest level of observation at which it is found."""
        families = {id.partition("/")[0] for id in self.finds}
        return next((level for level in ("content", "blocks") if families == {level}), "tokens")


@contextlib.contextmanager
def planted(fault: PlantedFault) -> Iterator[None]:
    """Have the fault in the engine's classes. Raises NotFound."""
    with contextlib.ExitStack() as undo:

        def put(holder: Any, name: str, made: Any) -> None:
            undo.callback(setattr, holder, name, inspect.getattr_static(holder, name))
            setattr(holder, name, made)

        def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            put(owner, name, functools.wraps(original)(make(original)))

        for change in fault.code:
            _compile(fault.name, change, put)
        if fault.write is not None:
            fault.write(wrap)
        yield


def _compile(name: str, change: Change, put: Callable[[Any, str, Any], None]) -> None:
    first, _, method = change.where.partition(".")
    module = importlib.import_module(PLACES[first])
    owner = getattr(module, first, None)
    holder = owner or module
    original = inspect.getattr_static(holder, method, None)
    if original is None:
        raise NotFound(f"{name}: there is no {change.where}")
    function = inspect.unwrap(getattr(holder, method))
    body = getattr(function, "planted_source", None) or textwrap.dedent(inspect.getsource(function))
    try:
        source = change.changed(body)
    except NotFound as missing:
        raise NotFound(f"{name}: {missing}") from None
    # A function within one that has `__class__` may call super() without arguments.
    code = f"def _make(__class__):\n{textwrap.indent(source, '    ')}\n    return {method}\n"
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    exec(compile(code, f"<{name}>", "exec", flags, dont_inherit=True), vars(module), made)
    changed = made["_make"](owner)
    if inspect.isfunction(changed):
        changed.planted_source = source  # type: ignore[attr-defined]  # for a second change of the function
    for each in [holder] if owner else _importers(method, original):
        put(each, method, changed)


def _importers(name: str, function: Any) -> list[Any]:
    """The modules of vLLM's core that have a function under its name."""
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith(CORE) and vars(module).get(name) is function
    ]
