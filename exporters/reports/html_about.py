"""What the trace of a report is of: model, release, connector, configuration, range, engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...audit.events import Setting
from ...audit.replay.engine_audit import EngineAudit
from ...audit.text import utc
from .terminal import counted

SHOWN = 3
"""How many different values a line names."""

SETTINGS = {
    "block_size": "block size {}",
    "blocks": "{:,} blocks",
    "max_batched_tokens": "{:,} tokens a step",
    "max_running": "{:,} running requests",
    "policy": "policy {}",
    "workers": "{} workers",
}
"""Settings of the configuration that are shown, where they are known."""


def about(engine_audits: Sequence[EngineAudit]) -> list[tuple[str, str]]:
    """The lines of the header, each with its name. A line without a value is left out."""
    lines = {
        "Model": _values(audit.model for audit in engine_audits),
        "Release": _values(_release(audit) for audit in engine_audits),
        "Connector": _values(audit.connector for audit in engine_audits if audit.connector != "none"),
        "Configuration": _values(", ".join(_configuration(audit)) for audit in engine_audits),
        "Range": _range(engine_audits),
        "Engines": counted(len({audit.name for audit in engine_audits}), "engine"),
    }
    return [(name, value) for name, value in lines.items() if value]


def _release(audit: EngineAudit) -> str:
    return f"{audit.engine.engine} {audit.engine.version}, level {audit.engine.level}" if audit.engine else ""


def _configuration(audit: EngineAudit) -> Iterator[str]:
    settings: dict[str, Setting] = audit.engine.configuration if audit.engine else {}
    for name, text in SETTINGS.items():
        value = settings.get(name)
        if value and not (name == "workers" and value == 1):
            yield text.format(value)
    if settings.get("prefix_caching") is False:
        yield "no prefix caching"
    if settings.get("asynchronous"):
        yield "async scheduling"


def _range(engine_audits: Sequence[EngineAudit]) -> str:
    """First and last event of all engines, in UTC."""
    known = [audit for audit in engine_audits if audit.began_seconds is not None]
    if not known:
        return ""
    first = min(audit.created for audit in known)
    last = max((audit.began_seconds or 0.0) + audit.last_at / 1e6 for audit in known)
    return f"{utc(first)} to {utc(last)}"


def _values(values: Iterable[str]) -> str:
    """The different values, the first few of many."""
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more
