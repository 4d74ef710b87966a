"""Hide attributes of the engine's objects from kvledger's observers, but not from the engine.

This imitates an engine that has renamed an attribute: the engine's own code still works, and a hook that
reads the old name gets an ``AttributeError``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import kvledger.audit.hooks

ENGINES = Path(kvledger.audit.hooks.__file__).parent / "engines"
HOST_FILES = (
    "v1/request.py",
    "v1/outputs.py",
    "v1/engine/__init__.py",
    "v1/core/block_pool.py",
    "v1/core/kv_cache_utils.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/single_type_kv_cache_manager.py",
    "v1/core/sched/output.py",
    "v1/core/sched/scheduler.py",
)
DEFINED = re.compile(r"self\.(\w+)\b|^    (\w+): |^    def (\w+)\(self", re.MULTILINE)
"""Attributes and methods of the host's classes."""

OBSERVERS = ("kvledger.audit.engines", "kvledger.audit.hooks")


def attributes_read(*patterns: str) -> list[str]:
    """Attributes of vLLM's classes that the code of the hooks reads, according to its syntax trees."""
    trees = [ast.parse(path.read_text()) for pattern in patterns for path in ENGINES.glob(pattern)]
    names = {node.attr for tree in trees for node in ast.walk(tree) if _is_read(node)}
    host = importlib.util.find_spec("vllm")
    if host is None or host.origin is None:
        return []
    folder = Path(host.origin).parent
    defined = {
        word
        for file in HOST_FILES
        for words in DEFINED.findall((folder / file).read_text())
        for word in words
    }
    return sorted(names & defined)


@cache
def optional_attributes(*patterns: str) -> set[str]:
    """Attributes that may be missing: the hooks read them by ``getattr`` or check them by ``hasattr``."""
    trees = [ast.parse(path.read_text()) for pattern in patterns for path in ENGINES.glob(pattern)]
    return {
        node.args[1].value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and isinstance(node.args[1], ast.Constant)
    }


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def host_classes(scheduler: Any) -> list[type[Any]]:
    """The classes whose instances the hooks receive, or reach from the scheduler."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched import output
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    outputs = [output.SchedulerOutput, output.CachedRequestData, output.NewRequestData, ModelRunnerOutput]
    blocks = [BlockPool, KVCacheManager, KVCacheBlock, SingleTypeKVCacheManager]
    return [*outputs, *blocks, Request, type(scheduler)]


@contextmanager
def hidden(name: str, classes: list[type[Any]]) -> Iterator[list[str]]:
    """Hide an attribute of the classes' instances; yield a list that gets an entry for each failed read."""
    reads: list[str] = []

    def hide(class_: type[Any]) -> None:
        read = class_.__getattribute__

        def __getattribute__(self: Any, attribute: str) -> Any:
            if attribute == name and str(sys._getframe(1).f_globals.get("__name__")).startswith(OBSERVERS):
                reads.append(f"{class_.__name__}.{name}")
                raise AttributeError(f"{class_.__name__!r} object has no attribute {name!r}")
            return read(self, attribute)

        class_.__getattribute__ = __getattribute__  # type: ignore[method-assign]

    overridden = [class_ for class_ in classes if "__getattribute__" in vars(class_)]
    assert not overridden
    for class_ in classes:
        hide(class_)
    try:
        yield reads
    finally:
        for class_ in classes:
            del class_.__getattribute__
