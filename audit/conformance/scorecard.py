"""A fixed scenario for any connector, a row a situation: what was reached, and what broke in it.

Every row has an engine of its own: the real scheduler, the connector's scheduler side and its worker
side (`worker`), and a store that earlier requests of the row have filled through the connector itself.
The row is then judged twice: by the audit of what was observed, and by looking into the cache, where
each new life must stand on the KV of its own tokens.

A connector can't be made to answer: a row whose situation did not come about says so and is not
judged. A row that ends with an exception, of the scheduler or of the connector, broke.
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
from .situations import SITUATIONS, Situation
from .stage import Stage

Outcome = Literal["clean", "violated", "unknown", "not reached", "broke"]
FOLDER = "{folder}"
PACKAGES = ("lmcache", "nixl")
"""Whose versions a card names beside vLLM's, where they are loaded."""
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
"""What known connectors are configured with; :data:`FOLDER` stands for an empty folder, a row each."""


DISAGGREGATED = frozenset({"NixlConnector", "NixlPullConnector"})
"""Known connectors that take KV from another engine and know no store."""

ENGINES_OWN = {"tokens/in-flight": "a load that fails"}
"""Findings that vLLM makes with any connector, by the situations they come in (``docs/findings.md``)."""


class Row(msgspec.Struct, frozen=True):
    """One situation under one scheduler. ``broke``: a sentence each, of what was wrong."""

    situation: str
    scheduler: str
    outcome: Outcome
    external_tokens: int
    served_tokens: int
    broke: list[str]


class Card(msgspec.Struct, frozen=True):
    """A connector's score card.

    ``plan``: ``read`` or ``opaque``. ``disaggregated``: the store is another engine's cache.
    """

    connector: str
    engine: str
    plan: str
    rows: list[Row]
    disaggregated: bool = False

    @property
    def verdict(self) -> Literal["clean", "violated", "unknown"]:
        """As an audit's: unknown where a row is, or where no row ever got a token from the store."""
        outcomes = {row.outcome for row in self.rows}
        if outcomes & {"violated", "broke"}:
            return "violated"
        served = any(row.external_tokens and row.served_tokens for row in self.rows)
        return "clean" if served and "unknown" not in outcomes else "unknown"


def score(
    connector: str,
    module: Path | None = None,
    options: Mapping[str, Any] | None = None,
    rows: Callable[[Row], None] = lambda _: None,
    disaggregated: bool | None = None,
) -> Card:
    """Drive a connector through every row under both schedulers; ``rows`` is told of each as it ends.

    ``connector`` is a name that vLLM registers, or that of a class in ``module``. ``disaggregated``: what a
    request takes from elsewhere, a second engine has prefilled; by default for those of
    :data:`DISAGGREGATED`. Raises :class:`LedgerError` for a connector that can't be had.
    """
    paired = connector in DISAGGREGATED if disaggregated is None else disaggregated
    name = _importable(module) if module else None
    known = OPTIONS.get(connector, {}) if options is None else options
    done: list[Row] = []
    plan = "opaque"
    with _quiet():
        _constructed(connector, name, known, paired)
        for situation in SITUATIONS:
            for asynchronous in (False, True):
                with tempfile.TemporaryDirectory(prefix="kvledger-conformance-") as folder:
                    setup = {
                        "connector": connector,
                        "connector_module": name,
                        "connector_options": tuple(_placed(known, folder).items()),
                        "asynchronous": asynchronous,
                    }
                    row, plan = _row(situation, setup, folder, paired)
                done.append(row)
                rows(row)
    return Card(connector, _engine(), plan, done, paired)


def _engine() -> str:
    """vLLM's version, and those of the packages behind a connector that were loaded for it."""
    from ..engines import host_version

    said = [f"vllm {host_version()}"]
    for name in PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(PackageNotFoundError):
                said.append(f"{name} {version(name)}")
    return ", ".join(said)


def _row(situation: Situation, setup: dict[str, Any], folder: str, paired: bool) -> tuple[Row, str]:
    scheduler = "async" if setup["asynchronous"] else "sync"
    stage, raised = Stage(f"{situation.title} {scheduler}", paired), ""
    try:
        try:
            situation.drive(stage, setup)
        finally:
            stage.end()
    except Exception as error:
        raised = _raised(error).replace(folder, FOLDER)
    events: list[ev.Event] = []
    found: list[str] = []
    doubts: list[str] = []
    external, plan = 0, "opaque"
    for sink, _ in stage.observed:
        auditor = Auditor(keep_closed=True)
        seen = sink.take()
        auditor.feed_all(seen)
        events += seen
        found += [f"{v.id}: {v.message}" for v in auditor.violations if _counts(v, situation)]
        doubts += auditor.doubts
        external += auditor.ledger.totals().loaded
        if auditor.ledger.engine:
            plan = str(auditor.ledger.engine.configuration.get("plan"))
    found += [_said(stale) for engine in stage.engines for stale in engine.worker.stale]
    outcome: Outcome = "clean" if situation.reached(events) else "not reached"
    if raised or found or doubts:
        outcome = "broke" if raised else "violated" if found else "unknown"
    return Row(
        situation=situation.title,
        scheduler=scheduler,
        outcome=outcome,
        external_tokens=external,
        served_tokens=sum(e.worker.served for e in stage.engines if e is not stage.prefiller),
        broke=[*([raised] if raised else []), *found, *doubts],
    ), plan


def _raised(error: Exception) -> str:
    """What it is, what it says, and the function that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:300]
    place = f"in {last.name} of {'/'.join(Path(last.filename).parts[-2:])}"
    return f"{type(error).__name__} {place}{f': {said}' if said else ''}"


def _counts(violation: Violation, situation: Situation) -> bool:
    """Whether a finding is held against the connector."""
    known = ENGINES_OWN.get(violation.id, "nothing")
    return violation.severity == "violation" and not situation.title.startswith(known)


def _said(stale: Any) -> str:
    return (
        f"Request {stale.request_id} ran over {stale.tokens} tokens of KV that is not its own, from "
        f"position {stale.position} up."
    )


def _importable(module: Path) -> str:
    """The name under which a file can be imported from now on."""
    if not module.is_file():
        raise LedgerError(f"there is no file {module}")
    sys.path.insert(0, str(module.resolve().parent))
    return module.stem


def _constructed(connector: str, module: str | None, options: Mapping[str, Any], paired: bool) -> None:
    """Begin an engine with the connector, or say in one sentence why there is none."""
    importlib.import_module("vllm")  # without it, the command line says what to install
    try:
        package = "vllm.distributed.kv_transfer.kv_connector.factory"
        factory = importlib.import_module(package).KVConnectorFactory
        if module is not None:
            getattr(importlib.import_module(module), connector)
        elif connector not in factory._registry:
            known = ", ".join(sorted(factory._registry))
            raise LedgerError(f"vLLM registers no connector {connector!r}; it has {known}")
        with tempfile.TemporaryDirectory(prefix="kvledger-conformance-") as folder:
            placed = tuple(_placed(options, folder).items())
            stage = Stage(disaggregated=paired)
            try:
                stage.begin(connector=connector, connector_module=module, connector_options=placed)
            finally:
                stage.end()
    except LedgerError:
        raise
    except Exception as error:  # whatever it misses here: a device, a server, a setting
        raise LedgerError(f"the connector {connector} can't be begun here: {error}") from error


def _placed(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The options, with a real folder in place of :data:`FOLDER`."""
    placed: dict[str, Any] = json.loads(json.dumps(dict(options)).replace(FOLDER, folder))
    return placed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """vLLM logs to standard output while it is imported."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
