"""A mutant: one small fault, put into one function of the installed vLLM for a while.

A mutant replaces a few tokens in the source of one function. The changed source is compiled in the module
of the function and put in its place, on its class or in its module.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
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
}
"""The module of each class, and of the functions that belong to none."""


class NotFound(Exception):
    """The installed vLLM does not have the code that a mutant changes."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    kind: str
    """What sort of mistake it is."""
    says: str
    """What the engine does wrong, as a sentence."""
    where: str
    """Class and method, or module and function, of PLACES."""
    old: str
    """The tokens that are replaced, within one line."""
    new: str
    """What replaces them."""
    place: int = 0
    """Which occurrence of ``old`` is replaced, from 1; 0 if there is one only."""
    why: str = ""
    """If nothing finds it: why not."""
    release: str = "0.32.0"
    """The vLLM that it changes."""
    link: str = ""
    """The upstream change that it reverts."""

    def changed(self, source: str) -> str:
        """The source of the function with the fault. Raises NotFound."""
        parts = source.split(self.old)
        if len(parts) < 2 or (self.place == 0 and len(parts) != 2) or len(parts) <= self.place:
            raise NotFound(f"{self.name}: {len(parts) - 1} times {self.old!r} in {self.where}")
        place = self.place or 1
        return self.old.join(parts[:place]) + self.new + self.old.join(parts[place:])


def _target(mutant: Mutant) -> tuple[Any, str, Any]:
    """The module, the name of the class or "", and the function as it stands there."""
    first, _, name = mutant.where.partition(".")
    module = importlib.import_module(PLACES[first])
    owner = getattr(module, first, None)
    function = inspect.getattr_static(owner or module, name, None)
    if function is None:
        raise NotFound(f"{mutant.name}: there is no {mutant.where}")
    return module, name, owner


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Have the fault in vLLM. Raises NotFound."""
    module, name, owner = _target(mutant)
    holder = owner or module
    original = inspect.getattr_static(holder, name)
    source = textwrap.dedent(inspect.getsource(getattr(holder, name)))
    body = textwrap.indent(mutant.changed(source), "    ")
    # A function within one that has `__class__` may call super() without arguments.
    code = f"def _make(__class__):\n{body}\n    return {name}\n"
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    exec(compile(code, f"<{mutant.name}>", "exec", flags, dont_inherit=True), vars(module), made)
    holders = [holder] if owner else _importers(name, original)
    for each in holders:
        setattr(each, name, made["_make"](owner))
    try:
        yield
    finally:
        for each in holders:
            setattr(each, name, original)


def _importers(name: str, function: Any) -> list[Any]:
    """The modules of vLLM's core that have a function under its name."""
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith(CORE) and vars(module).get(name) is function
    ]
