"""Plays random histories on vLLM's scheduler, and says how the ledger and the oracle differ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.differential.compare import Comparison, Difference, Judged, compared, ledger_figures
from tests.differential.content import Device
from tests.differential.oracle import Lookups, Oracle, OracleAccount
from tests.differential.player import play, tiers_of
from tests.differential.random_histories import History, draw
from tests.differential.release_rules import has
from tests.differential.tape import LookupStats, Tape
from tests.engines.observed import audited, observe
from tests.scenarios.scripted_connector import TiersCall

from kvledger.audit.causes import TIER_UNKNOWN
from kvledger.audit.events import LookupsCounted
from kvledger.audit.faults.catalogue import catalogue
from kvledger.audit.ledger.weights import weights_used

LEVELS = ("tokens", "blocks")

READS = ("blocks/read-invalid", "blocks/uncommitted-hit")
"""Findings that name a request of which a step reads what is not there."""

GIVEN_BY_HITS = ("settled", "hit_again", "loaded_again", "first_prompt", "rework")
"""Figures that depend on what a local hit gave a request."""


def _are_suspect(rows: Iterable[tuple[int, int]]) -> str:
    """Of each output token, whether its step read KV of older weights; ``?``: not known."""
    return "".join("?" if oldest < 0 else "+" if oldest < version else "." for version, oldest in rows)


@dataclass
class Expected:
    """What an audit of one history must find."""

    history: History
    recorded: Tape
    oracle: Oracle
    device: Device
    raised: str
    tiers: Sequence[TiersCall]
    """When the engine asked for the tiers of external tokens."""

    def differences(self, level: str) -> list[Difference]:
        """How the audit of the same history at one level differs."""
        played, events = observe(lambda attach: play(self.history, attach), level)
        auditor = audited(events)
        found = [*self._of_findings(auditor), *self._of_figures(auditor, level)]
        if level == "blocks":
            found += self._of_reads(auditor)
            found += self._of_weights(auditor)
        if played.raised != self.raised:
            found.append(("raised", f"{played.raised!r} when observed, {self.raised!r} alone"))
        elif not self.raised:
            found += self._of_lookups(events)
            found += self._of_tiers(auditor)
        return [Difference(level, kind, text) for kind, text in found]

    def _of_findings(self, auditor: Any) -> Iterable[tuple[str, str]]:
        for violation in auditor.violations:
            if violation.severity == "violation" and not self.is_right(violation):
                yield violation.id, f"{violation.request}: {violation.message}"
        named = {(violation.id, violation.request) for violation in auditor.violations}
        for name, account in self.oracle.accounts.items():
            if account.undefined or (self.raised and not account.finished):
                continue
            if account.without_tokens and name not in {request for _, request in named}:
                yield "no token not found", f"{name}: a step computed positions that have no token"
            for fault in account.faults:
                if not has(fault):
                    yield "unknown fault", f"{name}: {fault}"
                    continue
                findings = catalogue()[fault].findings
                if findings and not named.intersection(product(findings, (name, None))):
                    yield "not found", f"{name}: {fault}"
        undefined = any(account.undefined for account in self.oracle.accounts.values())
        proved = ["the engine raised"] * self.recorded.raised + ["accounts are unknown"] * undefined
        doubts = [doubt for doubt in auditor.doubts if not any(words in doubt for words in proved)]
        if not self.raised and doubts:
            yield "doubts", "; ".join(auditor.doubts)

    def _of_reads(self, auditor: Any) -> Iterable[tuple[str, str]]:
        if any(account.resumed_early for account in self.oracle.accounts.values()):
            return  # no invariant covers it
        # In these releases a window moves by drafts of a step whose output the device does not have yet.
        moved = "drafts" in self.history.setup and has("window-moved-by-rejected-drafts")
        reads = [v for v in auditor.violations if v.id in READS]
        named = {v.request for v in reads if not (moved and v.figures["why"] == "left")}
        # A request whose placeholders or drafts are miscounted computes positions that have no token.
        wrong = {v.request for v in auditor.violations if v.severity == "violation"}
        for name in sorted(self.device.bad_reads - wrong):
            if self.oracle.accounts[name].load_failures or "drafts" in self.history.setup:
                continue  # the device does not follow these exactly
            yield "read not found", f"{name}: a step read positions without their KV"
        for name in sorted(named - self.device.bad_reads):
            yield "read was valid", f"{name}: every step read what it should"

    def _of_weights(self, auditor: Any) -> Iterable[tuple[str, str]]:
        """Under which weights tokens were sampled. The device does not follow drafts and failed loads."""
        if self.device.went_wrong or self.device.bad_reads or self.raised or "drafts" in self.history.setup:
            return
        stale = {v.request for v in auditor.violations if v.id == "weights/stale-hit"}
        for name, account in sorted(self.oracle.accounts.items()):
            if account.undefined or account.resumable or account.load_failures:
                continue
            if (name in stale) != (name in self.device.stale_hits):
                yield "stale hit", f"{name}: {name in stale} in the ledger, {name not in stale} on the device"
            used = weights_used(auditor.ledger.weights, auditor.ledger.closed[name])
            rows = [(each[2], each[3]) for each in used.output for _ in range(each[0], each[1])]
            # Some releases return tokens past a stop.
            sampled = self.device.sampled.get(name, [])[: len(rows)]
            ledger, device = map(_are_suspect, (rows, sampled))
            if ledger != device:
                yield "suspect outputs", f"{name}: {ledger} in the ledger, {device} on the device"

    def is_right(self, violation: Any) -> bool:
        """Whether the engine did what the violation says."""
        account = self.oracle.accounts.get(violation.request or "")
        if violation.id == "blocks/hash-content":
            preempted = account is not None and len(account.lives) > 1
            return self.device.went_wrong or bool(preempted and account.load_failures)
        if violation.id in READS or violation.id.startswith("weights/"):
            return True  # judged by request in _of_reads and _of_weights
        if violation.id == "requests/queued-once" and not violation.request:
            preempted = any(each.counts["preemptions"] for each in self.oracle.accounts.values())
            return preempted and has("ended-request-stays-queued")
        if violation.id == "tokens/beyond-sequence":
            # Drafts whose output is dropped stay in the engine's count.
            return bool(account and account.dropped_drafts and account.beyond_end)
        if violation.id == "tokens/in-flight" and "placeholder_tokens" not in violation.figures:
            return False
        return account is not None and any(
            has(fault) and violation.id in catalogue()[fault].findings for fault in self.faults(account)
        )

    def faults(self, account: OracleAccount) -> Iterator[str]:
        """The known faults of engines that what happened to a request may show."""
        yield from account.faults
        drafts, asynchronous = "drafts" in self.history.setup, self.history.setup["asynchronous"]
        if account.resumable and (drafts or self.history.depth > 2):
            # Both numbers are the engine's own. The device does not follow what is in flight at a turn's end.
            yield "session-skips-tokens"
        if account.resumable:
            yield "session-takes-a-past-output"
            yield "session-loses-its-tokens"
        if account.resumable and asynchronous:
            yield "session-waits-with-placeholders"
            yield "session-enqueued-twice"
        if account.load_failures and asynchronous:
            yield "placeholder-leak"
        if account.resets and asynchronous:
            yield "reset-drops-valid-token"
            if drafts:
                yield "reset-drops-outputs-by-tokens"
        if account.load_failures:
            yield "failed-load-as-local-hit"
            yield "failed-load-below-zero"
            yield "ended-before-it-ran"
        if len(account.lives) > 1:
            yield "negative-local-hit"

    def _of_figures(self, auditor: Any, level: str) -> Iterable[tuple[str, str]]:
        for name, account in self.oracle.accounts.items():
            if self.raised and not account.finished:
                continue  # The last step is not complete.
            statement = auditor.ledger.account(name)
            if account.undefined:
                if statement is not None and not statement.unknown:
                    yield "not unknown", f"{name}: a step had draft tokens without the token before them"
                continue
            if self.raised and statement is not None and statement.unknown:
                continue
            if "load-rounded-up" in account.faults or "ended-request-stays-queued" in account.faults:
                continue  # The engine's count is not the account's, or goes on after its end.
            if account.without_tokens:
                continue
            if statement is None or statement.unknown:
                yield "unknown", f"{name}: {'no account' if statement is None else statement.unknown}"
                continue
            figures = ledger_figures(statement)
            # Of a session, some releases keep a token past the stop of its last turn.
            if not account.resumable and account.sequence_tokens not in (None, statement.sequence_tokens):
                ends = f"{statement.sequence_tokens} in the ledger, {account.sequence_tokens} in the engine"
                yield "sequence_tokens", f"{name}: {ends}"
            for figure, expected in compared(account.figures()).items():
                # At level blocks a hit on a block without its KV gives the request no KV.
                if figure in GIVEN_BY_HITS and level == "blocks" and self.device.went_wrong:
                    continue
                if "rejection-of-a-past-life" in account.faults and figure.startswith("loaded"):
                    continue  # The engine subtracts them from the count of a load under way.
                if figures[figure] != expected:
                    yield figure, f"{name}: {figures[figure]} in the ledger, {expected} by position"

    def _of_tiers(self, auditor: Any) -> Iterable[tuple[str, str]]:
        """The tiers that the connector named are those of the account; loads have no other ones."""
        named: dict[str, Counter[str]] = {}
        for call in self.tiers:
            named.setdefault(call.request_id, Counter()).update(
                tiers_of(call.request_id, call.external_tokens)
            )
        for name, account in auditor.ledger.closed.items():
            if account.unknown or self.oracle.accounts[name].undefined:
                continue
            promised, expected = account.promised_by_tier, +named.get(name, Counter())
            if promised != expected:
                yield "promised tiers", f"{name}: {promised} in the ledger, {dict(expected)} by the connector"
            if not {*account.loaded_by_tier} <= {*expected, TIER_UNKNOWN}:
                yield "loaded tiers", f"{name}: {account.loaded_by_tier}"
            if sum(account.loaded_by_tier.values()) > account.loaded:
                yield "loaded tiers", f"{name}: {account.loaded_by_tier} of {account.loaded} tokens"

    def _of_lookups(self, events: Sequence[Any]) -> Iterable[tuple[str, str]]:
        counted = [event for event in events if isinstance(event, LookupsCounted)]
        sources: tuple[tuple[str, Lookups, LookupStats], ...] = (
            ("local", self.oracle.local, self.recorded.local_stats),
            ("external", self.oracle.external, self.recorded.external_stats),
        )
        for source, by_admission, stats in sources:
            engine = Lookups(stats.requests, stats.queries, stats.hits)
            if not engine.requests:
                continue  # This engine does not count them.
            sums = Lookups()
            for event in counted:
                for name in ("requests", "queries", "hits"):
                    tokens = max(0, getattr(event, f"{source}_{name}"))
                    setattr(sums, name, getattr(sums, name) + tokens)
            if sums != engine:
                yield f"{source} lookups", f"{sums} recorded, {engine} reported by the engine"
            if by_admission != engine:
                yield f"{source} lookups", f"{engine} reported by the engine, {by_admission} by admission"


def expected(history: History) -> Expected:
    """Play a history without kvledger, and read the tape."""
    recorded = Tape()
    played = play(history, recorded.attach)
    assert played.raised or played.idle, "the engine is not idle at the end"
    size = history.setup["block_size"]
    oracle = Oracle(size).read(recorded.facts)
    connector = played.driver.connector
    tiers = [] if connector is None else connector.calls(TiersCall)
    return Expected(history, recorded, oracle, Device().read(recorded), played.raised, tiers)


def judge(history: History, at: Sequence[str] = ()) -> Judged:
    """Every difference between the ledger and the oracle in one history, at all levels if none is given."""
    right = expected(history)
    found = [each for level in at or LEVELS for each in right.differences(level)]
    return Judged(found, right.device.went_wrong, bool(right.raised))


def compare(seeds: Iterable[int]) -> Comparison:
    """Compare the histories of ``seeds``."""
    result, disabled = Comparison(judge), logging.root.manager.disable
    logging.disable(logging.ERROR)  # vLLM reports every failed load
    try:
        for seed in seeds:
            result.add(draw(seed))
    finally:
        logging.disable(disabled)
    return result
