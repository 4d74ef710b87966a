"""The score card of a connector: fixed situations, whether each came about, and what went wrong in each.

Every situation has engines of its own: the real scheduler, the connector's scheduler side and its
worker side (`worker`), and a store that earlier requests of the situation filled through the connector
itself. A situation is judged twice: by auditing what was observed, and by looking into the KV cache,
where every request must run over the KV of its own tokens.

A connector can't be forced into a situation. One that did not come about is reported as such and not
judged. A situation that ends with an exception, of the scheduler or of the connector, broke.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import events as ev
from ..checks.auditor import Auditor
from ..checks.registry import Violation
from ..errors import LedgerError
from .observed_engines import ObservedEngines
from .situations import SITUATIONS, Situation

Outcome = Literal["clean", "violated", "unknown", "not reached", "broke"]
FOLDER = "{folder}"
PACKAGES = ("lmcache", "nixl")
"""Packages whose versions a card names beside vLLM's, where they are loaded."""
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
"""How known connectors are configured. :data:`FOLDER` stands for an empty folder per situation."""

DISAGGREGATED = frozenset({"NixlConnector", "NixlPullConnector"})
"""Known connectors that read KV from another engine and have no store."""

VLLM_FAULTS = {"tokens/in-flight": "load fails"}
"""Findings that vLLM itself causes with any connector (``docs/findings.md``): by id, the beginning of
the titles of the situations that show them."""


class SituationResult(msgspec.Struct, frozen=True):
    """The result of one situation under one scheduler.

    ``external_tokens`` is what the ledger counts as loaded from the store, ``served_tokens`` what the cache
    really held when a request began to run over it. ``problems`` has one sentence for each thing that
    went wrong.
    """

    situation: str
    scheduler: str
    outcome: Outcome
    external_tokens: int
    served_tokens: int
    problems: list[str]


class ScoreCard(msgspec.Struct, frozen=True):
    """A connector's score card.

    ``connector_metadata`` is ``read`` where kvledger has a reader for it and ``opaque`` where not.
    ``disaggregated``: the store is another engine's cache.
    """

    connector: str
    engine: str
    connector_metadata: str
    rows: list[SituationResult]
    disaggregated: bool = False

    @property
    def verdict(self) -> Literal["clean", "violated", "unknown"]:
        """The verdict of all situations; unknown also where no situation ever got a token from the store."""
        outcomes = {row.outcome for row in self.rows}
        if outcomes & {"violated", "broke"}:
            return "violated"
        served = any(row.external_tokens and row.served_tokens for row in self.rows)
        return "clean" if served and "unknown" not in outcomes else "unknown"


def score(
    connector: str,
    module: Path | None = None,
    options: Mapping[str, Any] | None = None,
    on_result: Callable[[SituationResult], None] = lambda _: None,
    disaggregated: bool | None = None,
) -> ScoreCard:
    """Drive a connector through every situation under the sync and the async scheduler.

    ``connector`` is a name that vLLM registers, or that of a class in ``module``. ``disaggregated``: a second
    engine prefills what requests load; by default this holds for the connectors of
    :data:`DISAGGREGATED`. ``on_result`` is called with each result as it is made. Raises
    :class:`LedgerError` for a connector that can't be started here.
    """
    paired = connector in DISAGGREGATED if disaggregated is None else disaggregated
    name = _importable(module) if module else None
    configured = OPTIONS.get(connector, {}) if options is None else options
    results: list[SituationResult] = []
    metadata = "opaque"
    with _stdout_to_stderr():
        _try_to_start(connector, name, configured, paired)
        for situation in SITUATIONS:
            for asynchronous in (False, True):
                with tempfile.TemporaryDirectory(prefix="kvledger-conformance-") as folder:
                    setup = {
                        "connector": connector,
                        "connector_module": name,
                        "connector_options": tuple(_with_folder(configured, folder).items()),
                        "asynchronous": asynchronous,
                    }
                    result, metadata = _drive(situation, setup, folder, paired)
                results.append(result)
                on_result(result)
    return ScoreCard(connector, _versions(), metadata, results, paired)


def _versions() -> str:
    """The version of vLLM, and of each of :data:`PACKAGES` that was loaded."""
    from ..engines import host_version

    versions = [f"vllm {host_version()}"]
    for name in PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(PackageNotFoundError):
                versions.append(f"{name} {version(name)}")
    return ", ".join(versions)


def _drive(
    situation: Situation, setup: dict[str, Any], folder: str, paired: bool
) -> tuple[SituationResult, str]:
    """The result of one situation, and whether the connector's metadata was read."""
    scheduler = "async" if setup["asynchronous"] else "sync"
    engines, raised = ObservedEngines(f"{situation.title} {scheduler}", paired), ""
    try:
        try:
            situation.drive(engines, setup)
        finally:
            engines.stop()
    except Exception as error:
        raised = _describe(error).replace(folder, FOLDER)
    events: list[ev.Event] = []
    problems: list[str] = []
    doubts: list[str] = []
    external, metadata = 0, "opaque"
    for sink, _ in engines.observed:
        auditor = Auditor(keep_closed=True)
        of_engine = sink.take()
        auditor.feed_all(of_engine)
        events += of_engine
        problems += [f"{v.id}: {v.message}" for v in auditor.violations if _counts(v, situation)]
        doubts += auditor.doubts
        external += auditor.ledger.totals().loaded
        if auditor.ledger.engine:
            metadata = str(auditor.ledger.engine.configuration.get("plan"))
    problems += [wrong.sentence for driver in engines.drivers for wrong in driver.worker.wrong_kv]
    outcome: Outcome = "clean" if situation.reached(events) else "not reached"
    if raised or problems or doubts:
        outcome = "broke" if raised else "violated" if problems else "unknown"
    return SituationResult(
        situation=situation.title,
        scheduler=scheduler,
        outcome=outcome,
        external_tokens=external,
        served_tokens=sum(d.worker.served for d in engines.drivers if d is not engines.prefiller),
        problems=[*([raised] if raised else []), *problems, *doubts],
    ), metadata


def _describe(error: Exception) -> str:
    """The kind of an exception, the function that raised it, and its message."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:300]
    place = f"in {last.name} of {'/'.join(Path(last.filename).parts[-2:])}"
    return f"{type(error).__name__} {place}{f': {message}' if message else ''}"


def _counts(violation: Violation, situation: Situation) -> bool:
    """Whether a finding is held against the connector."""
    titles = VLLM_FAULTS.get(violation.id)
    from_vllm = titles is not None and situation.title.startswith(titles)
    return violation.severity == "violation" and not from_vllm


def _importable(module: Path) -> str:
    """Put a file's folder on the import path; returns the name to import the file by."""
    if not module.is_file():
        raise LedgerError(f"there is no file {module}")
    sys.path.insert(0, str(module.resolve().parent))
    return module.stem


def _try_to_start(connector: str, module: str | None, options: Mapping[str, Any], paired: bool) -> None:
    """Start an engine with the connector, or raise :class:`LedgerError` with the reason it can't be."""
    importlib.import_module("vllm")  # without it, the command line says what to install
    try:
        package = "vllm.distributed.kv_transfer.kv_connector.factory"
        factory = importlib.import_module(package).KVConnectorFactory
        if module is not None:
            getattr(importlib.import_module(module), connector)
        elif connector not in factory._registry:
            names = ", ".join(sorted(factory._registry))
            raise LedgerError(f"vLLM registers no connector {connector!r}; it has {names}")
        with tempfile.TemporaryDirectory(prefix="kvledger-conformance-") as folder:
            configured = tuple(_with_folder(options, folder).items())
            engines = ObservedEngines(disaggregated=paired)
            try:
                engines.start(connector=connector, connector_module=module, connector_options=configured)
            finally:
                engines.stop()
    except LedgerError:
        raise
    except Exception as error:  # a missing device, server or setting
        raise LedgerError(f"the connector {connector} can't be started here: {error}") from error


def _with_folder(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The options, with a real folder in place of :data:`FOLDER`."""
    options_here: dict[str, Any] = json.loads(json.dumps(dict(options)).replace(FOLDER, folder))
    return options_here


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep standard output for the card: vLLM logs there while it is imported."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
