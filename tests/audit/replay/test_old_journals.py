"""Journals that older versions of kvledger wrote are read with equal results.

``journals/NAME.tar.xz`` holds the journals of one run, as an older version wrote them:

- ``demo-*``: the demo on vLLM 0.32.0, without or with a reinstated defect, at level tokens or blocks
- ``scheduler-RELEASE-LEVEL``: scenarios driven through that release's scheduler, one journal each
- ``scheduler-0.9.2-v0``: the same with vLLM's v0 scheduler
- ``scheduler-0.32.0-schema-1``: written with the first schema, whose block events no engine emits any more

One journal of ``scheduler-0.20.0-blocks`` lacks its first segment, and one of ``scheduler-0.32.0-tokens``
has a torn tail. ``journals/NAME.json`` has what ``audit``, ``summary`` and ``why`` printed with ``--format
json`` in the version before the folders were laid out by layer. Sentences and paths are left out. Sentences
may change and JSON keys may be added; figures, ids and verdicts may not change. Two verdicts have changed
since, with the rules: a journal without its first segment was unknown, and rotation is no loss now; a request
of ``preempt_forced_async`` got a token twice on 0.20.0, and was clean.
What invariants find that were added since is not compared.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvledger import cli

JOURNALS = Path(__file__).parent / "journals"
COMMANDS = ("audit", "summary", "why")
SENTENCES = {"text", "message", "story", "notes"}
"""JSON keys whose values are sentences."""

WORDS = {"where", "what", "has", "meaning"}
"""Figures of a finding that are parts of its sentence."""

ADDED_SINCE = ("metrics/", "tokens/sampled-twice")
"""Beginnings of the ids of invariants that were added since."""


def figures(value: Any) -> Any:
    """``value`` without sentences, and with the names of paths only."""
    if isinstance(value, dict):
        return {
            key: Path(item).name if key == "path" else figures(item)
            for key, item in value.items()
            if key not in SENTENCES | WORDS
        }
    return [figures(item) for item in value] if isinstance(value, list) else value


def without_new_findings(audit: dict[str, Any]) -> dict[str, Any]:
    """What ``audit`` printed, without the findings of invariants that were added since."""
    kept = [row for row in audit["violations"] if not row["id"].startswith(ADDED_SINCE)]
    return audit | {"violations": kept, "drift": sum(row["severity"] == "drift" for row in kept)}


def read(journals: Path) -> dict[str, Any]:
    """What the commands print about the journals in a folder."""
    results = {}
    for command in COMMANDS:
        printed = io.StringIO()
        sys.argv = ["kvledger", command, str(journals), "--format", "json", "--jobs", "1"]
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as raised:
            cli.main()
        result = json.loads(printed.getvalue())
        if command == "audit":
            result = without_new_findings(result)
        results[command] = {"exit_code": raised.value.code, "json": figures(result)}
    return results


def without_new_keys(result: Any, older: Any) -> Any:
    """``result`` without the JSON keys that the older version did not print."""
    if isinstance(result, dict) and isinstance(older, dict):
        return {key: without_new_keys(item, older[key]) for key, item in result.items() if key in older}
    if isinstance(result, list) and isinstance(older, list) and len(result) == len(older):
        return [without_new_keys(*pair) for pair in zip(result, older, strict=True)]
    return result


@pytest.mark.parametrize("archive", sorted(JOURNALS.glob("*.tar.xz")), ids=lambda path: path.name[:-7])
def test_a_journal_of_an_older_version_is_read_with_equal_results(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    name = archive.name.removesuffix(".tar.xz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")

    older = json.loads((JOURNALS / f"{name}.json").read_text())
    assert older == without_new_keys(read(tmp_path / name), older)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(json.dumps(read(Path(folder)), indent=1))
