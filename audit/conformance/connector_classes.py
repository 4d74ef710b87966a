"""The connector that is driven: its class, how it is configured, and the connector that it inherits from."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LedgerError

FOLDER = "{folder}"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "ExampleConnector": {"shared_storage_path": FOLDER},
    "MultiConnector": {
        "connectors": [
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": f"{FOLDER}/{place}"},
            }
            for place in ("first", "second")
        ]
    },
}
"""How known connectors, and those that inherit from them, are configured. :data:`FOLDER` stands for an empty
folder per situation."""


class Recipe(NamedTuple):
    """A connector of vLLM with all that it takes to drive it on this CPU, by a short name."""

    connector: str
    package: str = ""
    """The module that it needs beside vLLM."""
    module: str | None = None
    options: Mapping[str, Any] | None = None
    limits: str = ""
    """What its score card does not reach here, and why."""


_PREFILLED = (
    "It reads from another engine that prefills the whole prompt, so it never promises a part of one, defers "
    "no lookup, and promises nothing after a preemption: these situations are not reached."
)
RECIPES: Mapping[str, Recipe] = {
    "example": Recipe(
        "ExampleConnector",
        limits="It answers each lookup at once, loads inside the step and never matches the last of whole "
        "blocks, so no lookup is deferred, no request waits for a load, and no hit is the whole prompt.",
    ),
    "offloading": Recipe(
        "OffloadingConnector",
        options={
            "spec_name": "CopyingSpec",
            "spec_module_path": "kvledger.audit.conformance.cpu_offloading",
            "cpu_bytes_to_use": 1 << 24,
        },
        limits="Its store is the engine's memory, so a new engine finds none of it, and it defers no lookup. "
        "vLLM's own spec refuses the CPU, so one of kvledger copies the blocks: the copies of a GPU, their "
        "streams and events are not reached.",
    ),
    "lmcache": Recipe(
        "LMCacheConnectorV1",
        "lmcache",
        "kvledger.audit.conformance.cpu_lmcache",
        {"lmcache.chunk_size": 16, "lmcache.max_local_cpu_size": 0.1, "lmcache.save_unfull_chunk": False},
        "It defers no lookup and loads inside the step, so no request waits. LMCache has no GPU connector "
        "for the CPU, so kvledger copies between its memory and the cache: its kernels, its server and "
        "remote stores are not reached. Chunks have 16 tokens: of 256, the usual, no prompt here fills one.",
    ),
    "nixl": Recipe("NixlConnector", "nixl", limits=_PREFILLED),
    "mooncake": Recipe(
        "MooncakeConnector",
        "mooncake.engine",
        limits="The wheel mooncake-transfer-engine-non-cuda has it and needs libibverbs.so.1 of the system. "
        "It reads from another engine over a bootstrap server; kvledger's tests have not driven it.",
    ),
}
"""The connectors that ``kvledger conformance`` drives without options."""

_PACKAGE = "vllm.distributed.kv_transfer.kv_connector"


class Connector(NamedTuple):
    """A connector by its name: one that vLLM registers, or a class in ``module``."""

    name: str
    class_: Any
    module: str | None
    options: Mapping[str, Any]

    def setup(self, folder: str) -> dict[str, Any]:
        """How an engine is set up with it; ``folder`` takes the place of :data:`FOLDER`."""
        options: dict[str, Any] = json.loads(json.dumps(dict(self.options)).replace(FOLDER, folder))
        return {
            "connector": self.name,
            "connector_module": self.module,
            "connector_options": tuple(options.items()),
        }

    @property
    def base(self) -> Connector | None:
        """The connector that it inherits from; None if that is vLLM's abstract class."""
        base = self.class_.__mro__[1]
        if base.__module__.startswith(f"{_PACKAGE}.v1.base") or not hasattr(base, "build_connector_meta"):
            return None
        return Connector(base.__name__, base, base.__module__, self.options)


def find_connector(name: str, module: Path | None, options: Mapping[str, Any] | None) -> Connector:
    """The connector of this name. Without ``options`` it is configured as the known one that it derives from.

    ``name`` may be that of a recipe. Raises :class:`LedgerError` for one that does not exist or can't be
    imported.
    """
    recipe = RECIPES.get(name) if module is None else None
    imported = _importable(module) if module else None
    if recipe is not None:
        try:
            importlib.import_module(recipe.package or "vllm")
        except ImportError as error:
            raise LedgerError(
                f"{recipe.connector} needs {recipe.package}, which can't be imported here: {error}. "
                + recipe.limits
            ) from error
        name, imported = recipe.connector, recipe.module
        options = recipe.options if options is None else options
    importlib.import_module("vllm")  # without it, the command line says what to install
    factory = importlib.import_module(f"{_PACKAGE}.factory").KVConnectorFactory
    if imported is None and name not in factory._registry:
        names = ", ".join(sorted(factory._registry))
        raise LedgerError(
            f"vLLM registers no connector {name!r}; it has {names}. Without options: {', '.join(RECIPES)}"
        )
    try:
        if imported is None:
            class_ = factory.get_connector_class_by_name(name)
        else:
            class_ = getattr(importlib.import_module(imported), name)
    except Exception as error:  # a missing package, or class
        raise LedgerError(f"the connector {name} can't be started here: {error}") from error
    known = (OPTIONS[each.__name__] for each in class_.__mro__ if each.__name__ in OPTIONS)
    return Connector(name, class_, imported, next(known, {}) if options is None else options)


def _importable(module: Path) -> str:
    """Put a file's folder on the import path; returns the name to import the file by."""
    if not module.is_file():
        raise LedgerError(f"there is no file {module}")
    sys.path.insert(0, str(module.resolve().parent))
    return module.stem
