"""Observers of vLLM's and SGLang's releases: the only folder that knows their names.

An adapter is the observer class of a family of releases. ``choose`` picks it by the product of a scheduler
and by the signatures that it has, not by its version. Creating an observer wraps nothing yet.
"""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

from ..hooks import EngineMismatch, check
from ..release_semantics import CONTRACTS, Product
from .connector_metadata import metadata_readers
from .pool.requirements import differences as pool_differences
from .sglang.observer import NO_OWNERS, SGLangObserver
from .source_files import HostSource, bare_scheduler, engine_core, engine_processes, read
from .v0.observer import V0Observer
from .v1_since_0_27 import V1Observer
from .v1_until_0_26 import V1Observer017, V1Observer018, V1Observer020, V1Observer026

__all__ = [
    "ADAPTERS",
    "LEVELS",
    "Adapter",
    "HostSource",
    "bare_scheduler",
    "blocks_out_of_reach",
    "choose",
    "differences",
    "engine_core",
    "engine_processes",
    "has_scheduler_seam",
    "host_source",
    "host_version",
    "is_scheduler",
    "out_of_reach",
    "read_connectors",
    "scheduler_config",
]

Adapter = type[V1Observer] | type[V0Observer] | type[SGLangObserver]

LEVELS = ("tokens", "blocks", "content")
"""What kvledger observes: tokens only, the block pool as well, or also the KV in the blocks."""

ADAPTERS: tuple[Adapter, ...] = (
    V1Observer,
    V1Observer026,
    V1Observer020,
    V1Observer018,
    V1Observer017,
    V0Observer,
)
"""Newest first, since a newer release often still has everything that an older adapter needs."""

BY_PRODUCT: dict[Product, tuple[Adapter, ...]] = {"vllm": ADAPTERS, "sglang": (SGLangObserver,)}
"""The adapters of each product; the first one is of a scheduler whose class is of no product's package."""

TAKES_OUTPUT = ("update_from_output", "process_batch_result")
"""The method of each product's scheduler that takes the outputs of a step."""


def choose(scheduler: Any, fields: tuple[str, ...] | None = None) -> Adapter:
    """The adapter whose hooks all fit ``scheduler``.

    ``fields`` are those of ``EngineCoreOutput``; by default vLLM is asked for them. Raises
    :class:`EngineMismatch`, which names the observed releases and the differences from the nearest adapter.
    """
    product = product_of(scheduler)
    adapters = BY_PRODUCT[product]
    nearest, least = adapters[0], None
    for adapter in adapters:
        differing = differences(adapter, scheduler, fields)
        if not differing:
            return adapter
        if least is None or len(differing) < len(least):
            nearest, least = adapter, differing
    raise EngineMismatch(
        f"kvledger observes {CONTRACTS[product].observed}; {type(scheduler).__name__} is not as "
        f"{nearest.NAME}, the nearest adapter, expects: " + "; ".join(least or ())
    )


def differences(adapter: Adapter, scheduler: Any, fields: tuple[str, ...] | None = None) -> list[str]:
    """Phrases for what ``adapter`` needs and ``scheduler`` lacks or declares otherwise."""
    phrases = []
    for hook in adapter.HOOKS:
        try:
            check((hook,), scheduler)
        except EngineMismatch as mismatch:
            phrases.append(str(mismatch).partition(": ")[2])
    needed = getattr(adapter, "HAS", ())
    phrases += [f"{name} is missing" for name in needed if not _has(scheduler, name)]
    expected = getattr(adapter, "OUTPUT", ())
    if expected and not phrases:
        present = output_fields() if fields is None else fields
        phrases += [f"EngineCoreOutput has no {name}" for name in expected if name not in present]
    return phrases


def product_of(scheduler: Any) -> Product:
    """The product whose package has the class of a scheduler, or one that it is derived from."""
    packages = {base.__module__.partition(".")[0] for base in type(scheduler).__mro__}
    return next((each for each in BY_PRODUCT if each in packages), next(iter(BY_PRODUCT)))


def is_scheduler(target: Any) -> bool:
    """Whether an object takes the outputs of steps, as schedulers do."""
    return any(hasattr(target, name) for name in TAKES_OUTPUT)


def blocks_out_of_reach(scheduler: Any) -> str:
    """Why kvledger can't observe this scheduler at level ``blocks``, in a phrase; "" if it can."""
    product = CONTRACTS[product_of(scheduler)]
    if product.level == "tokens":
        return f"{product.name}'s {NO_OWNERS}"
    return "; ".join(pool_differences(scheduler))


def _has(scheduler: Any, path: str) -> bool:
    try:
        attrgetter(path)(scheduler)
    except AttributeError:
        return False
    return True


def output_fields() -> tuple[str, ...]:
    """The fields of the output that a v1 engine sends its front end for a request."""
    from vllm.v1.engine import EngineCoreOutput

    return tuple(EngineCoreOutput.__struct_fields__)


def read_connectors() -> dict[str, tuple[str, ...]]:
    """For each known connector, what is read from its metadata: ``loads``, ``saves``, ``tracker``."""
    return {name: reader.READS for name, reader in metadata_readers().items()}


def host_source() -> HostSource | None:
    """The installed vLLM as its source files tell, without an import; None if they do not tell."""
    return read()


def host_version(scheduler: Any = None) -> str:
    """The version of the engine of ``scheduler``, or vLLM's. It was imported long before this runs."""
    return str(importlib.import_module(product_of(scheduler)).__version__)


def scheduler_config() -> Any:
    """vLLM's class whose ``get_scheduler_cls`` an EngineCore calls before it creates its scheduler."""
    from vllm.config.scheduler import SchedulerConfig

    return SchedulerConfig


def out_of_reach(adapter: Adapter, version: str, *, has_seam: bool) -> str:
    """Why the plugin can't reach an engine's scheduler here, in one sentence; "" if it can.

    ``has_seam``: ``SchedulerConfig`` has the method that the plugin wraps.
    """
    if adapter is V0Observer:
        return f"The plugin does not reach the v0 scheduler of vLLM {version}."
    if has_seam:
        return ""
    return (
        f"The plugin does not reach the scheduler of vLLM {version}, which has no "
        "SchedulerConfig.get_scheduler_cls; kvledger.attach does."
    )


def has_scheduler_seam() -> bool:
    """Whether vLLM's ``SchedulerConfig`` has the method that the plugin wraps."""
    try:
        return hasattr(scheduler_config(), "get_scheduler_cls")
    except ImportError:
        return False
