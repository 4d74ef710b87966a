"""The score card of a connector: situations, whether each came about, and what went wrong in each.

Every situation has engines of its own: the real scheduler, the connector's scheduler side and its
worker side (`worker`), and a store that earlier requests of the situation filled through the connector
itself. A situation is judged twice: by auditing what was observed, and by looking into the KV cache,
where every request must run over the KV of its own tokens.

A connector can't be forced into a situation. One that did not come about is reported as such and not
judged. A situation that ends with an exception, of the scheduler or of the connector, broke.

Where a connector fails, the connector that it inherits from is driven through the same situation. What goes
wrong there too is known, and not held against the connector.

After the fixed situations come drawn ones. The first that fails is shrunk: what the finding does not need is
left out, and the card has what remains.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from .. import events as ev
from .. import temporary
from ..checks.auditor import Auditor
from ..checks.registry import Violation
from ..errors import LedgerError
from ..ledger.account import Account
from .connector_classes import FOLDER, RECIPES, Connector, find_connector
from .situations import SITUATIONS, Drawn, Situation, draw
from .worker import ObservedEngines

Outcome = Literal["clean", "violated", "unknown", "not reached", "broke", "inherited"]
PACKAGES = ("lmcache", "mooncake", "nixl")
"""Packages whose versions a card names beside vLLM's, where they are loaded."""
DISAGGREGATED = frozenset({"MooncakeConnector", "NixlConnector", "NixlPullConnector"})
"""Known connectors that read KV from another engine and have no store."""

DRAWN = 40
"""How many situations are drawn for each scheduler."""
SHRINKS = 400
"""How many smaller ones are driven, of one that fails."""

VLLM_FAULTS = dict.fromkeys(("tokens/in-flight", "tokens/without-token"), "load fails")
"""Findings that vLLM itself causes with any connector (docs/reference/findings.md): by id, the beginning of
the titles of the situations that show them."""


class SituationResult(msgspec.Struct, frozen=True):
    """The result of one situation under one scheduler.

    ``external_tokens`` is what the ledger counts as loaded from the store, ``served_tokens`` what the cache
    really held when a request began to run over it. ``problems`` has one sentence for each thing that
    went wrong. The outcome ``inherited`` means that all of it goes wrong in the connector's base class too.
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
    limits: str = ""
    """What a recipe does not reach, and why."""

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
    drawn: int = DRAWN,
) -> ScoreCard:
    """Drive a connector through every situation under the sync and the async scheduler, and drawn ones.

    ``connector`` is a name that vLLM registers, or that of a class in ``module``. ``disaggregated``: a second
    engine prefills what requests load; by default this holds for the connectors of
    :data:`DISAGGREGATED`. ``on_result`` is called with each result as it is made. Raises
    :class:`LedgerError` for a connector that can't be started here.
    """
    recipe = RECIPES.get(connector) if module is None else None
    known = connector if recipe is None else recipe.connector
    paired = known in DISAGGREGATED if disaggregated is None else disaggregated
    results: list[SituationResult] = []
    metadata = "opaque"
    with quiet():
        driven = find_connector(connector, module, options)
        _try_to_start(driven, paired)
        for situation in SITUATIONS:
            for asynchronous in (False, True):
                result, metadata = _judged(situation, driven, asynchronous, paired)
                results.append(result)
                on_result(result)
        for asynchronous in (False, True) if drawn else ():
            results.append(_drawn(driven, asynchronous, paired, range(drawn)))
            on_result(results[-1])
    limits = "" if recipe is None else recipe.limits
    return ScoreCard(known, versions(), metadata, results, paired, limits)


def _drawn(connector: Connector, asynchronous: bool, paired: bool, seeds: Sequence[int]) -> SituationResult:
    """The result of drawn situations: the first that fails, shrunk, or all of them.

    What all of them left unknown, or inherit, is that of the first that did.
    """

    def drive(history: Drawn) -> SituationResult:
        situation = Situation(f"random: {history}", history.drive, bool)
        return _judged(situation, connector, asynchronous, paired)[0]

    results: list[SituationResult] = []
    for seed in seeds:
        result = drive(history := draw(seed))
        if result.outcome in ("violated", "broke"):
            return _shrunk(history, result, drive)
        results.append(result)
    external = sum(each.external_tokens for each in results)
    of_outcome = {each.outcome: each for each in reversed(results)}
    doubtful = of_outcome.get("unknown") or of_outcome.get("inherited")
    outcome: Outcome = "clean" if external else "not reached"
    return SituationResult(
        f"{len(seeds)} random histories",
        "async" if asynchronous else "sync",
        outcome if doubtful is None else doubtful.outcome,
        external,
        sum(each.served_tokens for each in results),
        [] if doubtful is None else doubtful.problems,
    )


def _shrunk(
    history: Drawn, result: SituationResult, drive: Callable[[Drawn], SituationResult]
) -> SituationResult:
    """The result of the smallest history found that fails in the same way, of SHRINKS at most."""
    smaller = history.smaller()
    for _ in range(SHRINKS):
        tried = next(smaller, None)
        if tried is None:
            break
        again = drive(tried)
        if again.outcome == result.outcome and _kinds(again) & _kinds(result):
            result, smaller = again, tried.smaller()
    return result


def _kinds(result: SituationResult) -> set[str]:
    """What kinds of problems there are: invariants, exceptions, or wrong KV."""
    words = (problem.partition(":")[0] for problem in result.problems)
    return {"wrong KV" if word.startswith("Request ") else word for word in words}


def _judged(
    situation: Situation, connector: Connector, asynchronous: bool, paired: bool
) -> tuple[SituationResult, str]:
    """The result of one situation, with what the base class does wrong too marked as known."""
    result, metadata = _in_own_store(situation, connector, asynchronous, paired)
    base = connector.base
    if result.outcome in ("broke", "violated") and base is not None:
        of_base, _ = _in_own_store(situation, base, asynchronous, paired)
        result = _without_inherited(result, of_base, base.name)
    return result, metadata


def _in_own_store(
    situation: Situation, connector: Connector, asynchronous: bool, paired: bool
) -> tuple[SituationResult, str]:
    """Drive a situation with an empty store: in a folder of its own, and with tokens of this run alone."""
    with temporary.folder("kvledger-conformance-") as folder:
        setup = {**connector.setup(folder), "asynchronous": asynchronous}
        return _drive(situation, setup, folder, paired)


def _without_inherited(result: SituationResult, of_base: SituationResult, base: str) -> SituationResult:
    """The result, with what goes wrong in the base class too marked as known."""
    known = {_UNLIKE.sub("*", problem) for problem in of_base.problems}
    inherited = [_UNLIKE.sub("*", problem) in known for problem in result.problems]
    return msgspec.structs.replace(
        result,
        outcome="inherited" if all(inherited) else result.outcome,
        problems=[
            f"known, inherited from {base}: {problem}" if like else problem
            for problem, like in zip(result.problems, inherited, strict=True)
        ],
    )


_UNLIKE = re.compile(r"[0-9a-f]{16,}")
"""Hashes of tokens, which differ from run to run."""


def versions() -> str:
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
    engines, raised = ObservedEngines(f"{situation.title} {scheduler} {uuid4()}", paired), ""
    try:
        try:
            situation.drive(engines, setup)
        finally:
            engines.stop()
    except Exception as error:
        raised = describe_exception(error).replace(folder, FOLDER)
    events: list[ev.Event] = []
    problems: list[str] = []
    doubts: list[str] = []
    external, metadata = 0, "opaque"
    for of_engine, driver in zip(engines.events, engines.drivers, strict=True):
        auditor = Auditor(keep_closed=True)
        auditor.feed_all(of_engine)
        events += of_engine
        accounts = {account.request_id: account for account in auditor.ledger.accounts()}
        problems += [
            f"{v.id}: {v.message}{_loads(accounts.get(v.request or ''))}"
            for v in auditor.violations
            if _counts(v, situation)
        ]
        problems += [
            wrong.sentence(_promised(accounts.get(wrong.request_id))) for wrong in driver.worker.wrong_kv
        ]
        doubts += auditor.doubts
        external += auditor.ledger.totals().loaded
        if auditor.ledger.engine:
            metadata = str(auditor.ledger.engine.configuration.get("plan"))
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


def _loads(account: Account | None) -> str:
    """The figures behind a finding: what the connector promised for the request, and what was loaded."""
    if account is None or not account.promised:
        return ""
    return f" Promised {account.promised:,}, loaded {account.loaded:,}."


def _promised(account: Account | None) -> int:
    """External tokens that a connector promised in one life; 0 if there are none, or lives differ."""
    promised = {life.external for life in account.lives if life.external} if account is not None else set()
    return promised.pop() if len(promised) == 1 else 0


def describe_exception(error: Exception) -> str:
    """The kind of an exception, where it was raised, and its message; of a bare assertion its text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:MESSAGE_CHARACTERS] or last.line or ""
    place = f"in {last.name} at {'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    return f"{type(error).__name__} {place}{f': {message}' if message else ''}"


MESSAGE_CHARACTERS = 300
"""Most characters of an exception's message."""


def _counts(violation: Violation, situation: Situation) -> bool:
    """Whether a finding is held against the connector."""
    titles = VLLM_FAULTS.get(violation.id)
    from_vllm = titles is not None and situation.title.startswith(titles)
    return violation.severity == "violation" and not from_vllm


def _try_to_start(connector: Connector, paired: bool) -> None:
    """Start an engine with the connector, or raise :class:`LedgerError` with the reason it can't be."""
    try:
        with temporary.folder("kvledger-conformance-") as folder:
            engines = ObservedEngines(disaggregated=paired)
            try:
                engines.start(**connector.setup(folder))
            finally:
                engines.stop()
    except Exception as error:  # a missing device, server or setting
        raise LedgerError(f"the connector {connector.name} can't be started here: {error}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep standard output for the card: vLLM logs there while it is imported."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
