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

    Raises :class:`LedgerError` for one that does not exist or can't be imported.
    """
    imported = _importable(module) if module else None
    importlib.import_module("vllm")  # without it, the command line says what to install
    factory = importlib.import_module(f"{_PACKAGE}.factory").KVConnectorFactory
    if imported is None and name not in factory._registry:
        names = ", ".join(sorted(factory._registry))
        raise LedgerError(f"vLLM registers no connector {name!r}; it has {names}")
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
