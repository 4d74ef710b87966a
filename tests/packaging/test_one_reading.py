"""Journals are read by one loop, which audits them; each other place says why it needs no audit."""

from __future__ import annotations

import ast

from tests.packaging.test_one_opener import ROOT, sources, tree

LOOP = "audit/replay/engine_audit.py"
"""``EngineAudit.batches``: every reader that needs accounts, findings or sums goes on from there."""

FOR_THE_LOOP = {
    "audit/repro/choose_finding.py": "a part of a journal",
    "exporters/facts/compact.py": "all but the last batch, which a later reader needs",
    "exporters/facts/replayed.py": "a journal from a kept session, and up to one",
    "exporters/sidecar/follower.py": "journals that grow",
}
"""Opens a journal for the loop."""

WITHOUT_AN_AUDIT = {
    "audit/journal/host_folders.py": "events in order, for callers that keep no accounts",
    "audit/replay/request_traces.py": "what blocks contain, in a sixth of the time of the ledger of blocks",
    "audit/replay/journal_parts.py": "which part of a journal the audit has to read",
    "audit/replay/recorded_events.py": "recordings of KV events, and journals beside them",
    "audit/replay/windows.py": "the newest description of an engine",
    "audit/replay/worker_journals.py": "what workers did, for the audit of their engine",
    "audit/repro/rebuild.py": "requests and a script, which are driven again",
}


def test_every_place_that_opens_a_journal_says_for_what() -> None:
    found = set()
    for path in [*sources(), *(ROOT / "dashboards").rglob("*.py")]:
        calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        if any(isinstance(call.func, ast.Name) and call.func.id == "Reader" for call in calls):
            found.add(str(path.relative_to(ROOT)))
    assert found == {LOOP, *FOR_THE_LOOP, *WITHOUT_AN_AUDIT}
