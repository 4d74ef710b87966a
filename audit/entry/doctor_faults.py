"""Which known faults concern the engine installed here, with the settings that its last journal recorded.

An engine's settings are known only once it has run: from the newest journal in the folder, if the same
release wrote it. Without one, each fault is named with all its conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from .. import engines
from ..errors import LedgerError
from ..events import EngineStarted
from ..faults.listing import KnownOfRelease, of_release
from ..faults.releases import Product
from ..journal.catalogue import ENGINE, Catalogue
from ..journal.reader import Reader

PRODUCTS: tuple[Product, ...] = ("vllm", "lmcache")


class FaultsHere(msgspec.Struct, frozen=True):
    """What is known of the installed releases. ``journal``: whose engine's settings count; "" for none."""

    journal: str
    releases: list[KnownOfRelease]


def diagnose_faults(
    versions: Mapping[str, str | None], adapter: str | None, directory: str | None
) -> FaultsHere:
    """The faults of the installed releases that neither the environment nor the last engine rules out."""
    journal, settings = _last_engine(Path(directory), versions.get("vllm")) if directory else ("", {})
    settings = {**settings, "lmcache": versions.get("lmcache")}
    if adapter is not None:
        settings["v0"] = adapter.startswith("v0")
    here = ((product, versions.get(product)) for product in PRODUCTS)
    return FaultsHere(journal, [of_release(product, each, settings) for product, each in here if each])


def installed() -> dict[str, str]:
    """The releases of vLLM and LMCache in this environment, by product, without an import of either."""
    found = {"vllm": _vllm(), "lmcache": version_of("lmcache")}
    return {product: each for product, each in found.items() if each}


def _vllm() -> str | None:
    try:
        source = engines.host_source()
    except ModuleNotFoundError:
        return None
    return source.version if source is not None else version_of("vllm")


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _last_engine(directory: Path, release: str | None) -> tuple[str, dict[str, object]]:
    """The newest journal that an engine of this release wrote here, and the engine's settings."""
    try:
        newest = next(iter(Catalogue(directory).newest_first(ENGINE)), None)
        engine = None if newest is None else _started(newest)
    except (LedgerError, OSError):  # there is no folder, or a live engine removes a segment meanwhile
        return "", {}
    if newest is None or engine is None or engine.version != release:
        return "", {}
    return newest.name, dict(engine.configuration)


def _started(journal: Path) -> EngineStarted | None:
    """The engine's description, which begins every segment."""
    with Reader(journal) as reader:
        batch = next(reader.poll(), None)
    events = batch.events if batch is not None else ()
    return next((event for event in events if isinstance(event, EngineStarted)), None)
