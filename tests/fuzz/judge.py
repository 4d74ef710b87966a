"""Reads a mutated journal as users do, and says what is wrong with the reading.

Nothing may crash or take longer than its time. A change of bytes, frames or segments is damage: every figure
that is still given for a request must be the figure of the original, and a request that is missing leaves a
doubt. A change of an event under a valid checksum may make another possible journal, so its figures may
differ; where the verdict is clean, they must be figures that add up.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from random import Random
from typing import NamedTuple
from unicodedata import category

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from tests.fuzz.mutations import mutated
from tests.fuzz.traces import Trace
from tests.time_limits import TooLong, limited, limited_memory

from kvledger import cli, cli_run
from kvledger.audit.errors import LedgerError
from kvledger.audit.ledger.account import AccountStatement
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters.metrics.prometheus import AuditCollector
from kvledger.exporters.reports import page, statement, summary, why  # noqa: F401  loaded in advance
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.trace import parquet  # noqa: F401  loaded in advance

OWN_BUG = cli_run.OWN_BUG

COMMANDS = (
    ("audit",),
    ("audit", "-v"),
    ("audit", "--format", "json"),
    ("audit", "--format", "csv"),
    ("audit", "--since", "1h"),
    ("summary", "--by", "hour"),
    ("summary", "--format", "json"),
    ("why",),
    ("why", "--format", "csv"),
    ("export timeline", "-o", "-"),
    ("export html", "-o", "-"),
    ("show", "r-0", "--every"),
    ("show", "r", "--format", "json"),
    ("export", "-o", "{out}"),
    ("audit follow",),
    ("audit follow", "--format", "json"),
)
"""Each mutated journal is read by ``audit_paths`` and by one of these, or by a follower with its metrics."""


class Reading(NamedTuple):
    """What an audit says of a journal."""

    verdict: str
    doubts: list[str]
    accounts: dict[str, AccountStatement]
    """The known accounts of ended requests, by request id."""


class Result(NamedTuple):
    """One mutated journal: what was changed, what the audit says, and what is wrong with that."""

    original: str
    level: str
    changes: str
    verdict: str
    wrong: str


def result(seed: int, originals: list[Trace], readings: dict[str, Reading | None]) -> Result:
    """Mutate one of ``originals`` as ``seed`` says, and judge the reading of it."""
    random = Random(seed)
    original = random.choice(originals)
    changed, level, changes = mutated(random, original)
    with tempfile.TemporaryDirectory() as place:
        if original.name not in readings:
            original.write(Path(place) / "original")
            readings[original.name] = read(Path(place) / "original")
        folder = Path(place) / "journals" / "engine-1-2-3"
        changed.write(folder)
        try:
            with limited(), limited_memory():
                after = read(folder)
                wrong = _printed(random, folder, Path(place) / "out")
        except TooLong:
            return Result(original.name, level, changes, "", "it takes too long")
        except Exception as error:
            return Result(original.name, level, changes, "", f"{type(error).__name__}: {error}")
    wrong = wrong or _figures(level, changed, readings[original.name], after)
    return Result(original.name, level, changes, after.verdict if after else "refused", wrong)


def read(folder: Path) -> Reading | None:
    """The audit of one journal; None if it is refused with a sentence."""
    try:
        audit = audit_paths([folder], (KeptAccounts,))
    except LedgerError:
        return None
    (engine,) = audit.engines
    statements = [account.freeze() for account in engine.of(KeptAccounts).sums]
    known = {one.request_id: one for one in statements if one.unknown is None and one.closed_at >= 0}
    return Reading(audit.verdict, [*audit.notes, *engine.doubts], known)


# --- what a user sees -------------------------------------------------------------------------------------


def _printed(random: Random, folder: Path, out: Path) -> str:
    """What is wrong with the output of one command, or of the sidecar."""
    choice = random.randrange(len(COMMANDS) + 2)
    if choice >= len(COMMANDS):
        return _served(folder.parent)
    command, *options = COMMANDS[choice]
    words = [*command.split(), str(folder), *(option.format(out=out) for option in options)]
    code, text = run(words)
    if code == OWN_BUG:
        return f"{command} {' '.join(options)} ends with {code}: {text.strip().splitlines()[-1]}"
    control = {each for each in text.replace("\r\n", "\n") if category(each) in ("Cc", "Cf")} - {"\n", "\t"}
    return f"{command} prints {sorted(control)!r}" if control else ""


def run(words: list[str]) -> tuple[int, str]:
    """The exit code of a command and what it printed, in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = cli.app(words, prog_name="kvledger", standalone_mode=False) or 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except Exception as error:
            code = cli_run.print_error(error)
    return code, printed.getvalue()


def _served(path: Path) -> str:
    """What is wrong when the sidecar follows the journal, saves, resumes and is scraped."""
    problems: list[str] = []
    try:
        for _ in range(2):
            follower = Follower(path, path / ".kvledger", problems.append)
            try:
                follower.catch_up()
                _scrape(follower)
            finally:
                follower.close()
    except LedgerError:
        return ""
    return next((problem for problem in problems if "kvledger itself failed" in problem), "")


def _scrape(follower: Follower) -> None:
    registry = CollectorRegistry()
    registry.register(AuditCollector(lambda: follower.audits, follower.lock, created=True))
    generate_latest(registry)


# --- figures ------------------------------------------------------------------------------------------------


def _figures(level: str, changed: Trace, before: Reading | None, after: Reading | None) -> str:
    if after is None:
        return ""
    if level == "events":
        return _adds_up(after) if after.verdict == "clean" else ""
    if before is None:
        return ""
    for request, account in after.accounts.items():
        if request not in before.accounts:
            return f"{request} is known, and is not known in the original"
        if figures(account) != figures(before.accounts[request]):
            return f"{request} has other figures than in the original"
    missing = before.accounts.keys() - after.accounts.keys()
    if missing and not after.doubts:
        return f"{len(missing)} requests are missing, and nothing says so"
    if missing and after.verdict == "clean" and not _front_removed(changed):
        return f"{len(missing)} requests are missing from a clean audit: {after.doubts}"
    return ""


def _front_removed(trace: Trace) -> bool:
    """Whether the first segment is gone, as after the writer removed its oldest ones."""
    first = {segment.name: segment for segment in trace.segments}.get("00000001.kvl")
    return first is None or first.special == "dangling"


def figures(account: AccountStatement) -> tuple[object, ...]:
    """The figures of an account that a reader gives, without times."""
    return (
        [
            (one.prompt_tokens, one.carried, one.local, one.external, one.computed, one.unattained)
            for one in account.settlements
        ],
        account.plan,
        account.reported,
        account.outcome,
        account.preemptions,
        account.scheduled,
        account.first_prompt,
        account.first_output,
        account.rework,
        account.rejected,
        account.overrun,
        account.promised,
        account.loaded,
        account.voided,
        account.discarded,
        account.hit_again,
        account.loaded_again,
    )


def _adds_up(reading: Reading) -> str:
    """What does not add up in the accounts of a clean audit."""
    for request, one in reading.accounts.items():
        again = sum(one.rework.values())
        work = one.first_prompt + one.first_output + again + one.rejected + one.overrun
        if one.scheduled != work:
            return f"{request} has {one.scheduled} scheduled tokens and work for {work} in a clean audit"
        for settled in one.settlements:
            sources = (settled.local, settled.external, settled.computed, settled.unattained)
            if min(sources) < 0 or sum(sources) != settled.prompt_tokens - settled.carried:
                return f"{request} settles {sources} of {settled.prompt_tokens} tokens in a clean audit"
    return ""
