"""What each command prints about the recorded journals and the golden histories, in JSON and CSV.

``python -m tests.golden.outputs`` writes the files of the folder ``printed``, one for each corpus and
command, with the exit code in its first line. A change of the product leaves them as they are, unless a
figure was wrong. The recorded journals are those that older versions of kvledger wrote:

- ``demo-*``: the demo on vLLM 0.32.0, without or with a reinstated defect, at level tokens or blocks
- ``scheduler-RELEASE-LEVEL``: scenarios driven through that release's scheduler, one journal each
- ``scheduler-0.9.2-v0``: the same with vLLM's v0 scheduler
- ``scheduler-0.32.0-schema-1``: written with the first schema, whose block events no engine emits any more

One journal of ``scheduler-0.20.0-blocks`` lacks its first segment, and one of ``scheduler-0.32.0-tokens`` has
a torn tail.

Sentences of findings are not here: they may change. What a command writes as HTML or Parquet is not, either.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import journals

HERE = Path(__file__).parent
PRINTED = HERE / "printed"
RECORDED = HERE.parent / "audit/replay/journals"
WRITTEN_SECONDS = 1_790_000_000
"""When the files of the golden histories were written last, which readers of torn journals print."""

SENTENCES = {"text", "message", "story", "notes", "words", "sentence", "sentences", "meaning", "doubts"}
"""JSON keys whose values are sentences."""

COMMANDS = {
    "audit": ["audit", "{}"],
    "summary": ["summary", "{}"],
    "summary-hours": ["summary", "{}", "--by", "hour,model"],
    "why": ["why", "{}"],
    "requests": ["query", "{}", "select * from requests order by all"],
    "causes": ["query", "{}", "select * from causes order by all"],
    "activity": ["query", "{}", "select * from activity order by all"],
    "findings": ["query", "{}", "select * exclude message from findings order by all"],
    "engines": ["query", "{}", "select * from engines order by all"],
    "whatif": ["whatif", "{}", "--blocks", "8,16,64", "--tiers", "64KiB", "--block-bytes", "1KiB"],
    "prefixes": ["summary", "prefixes", "{}"],
    "store": ["summary", "store", "{}"],
    "turns": ["why", "turns", "{}"],
    "blocks": ["summary", "blocks", "{}"],
    "ls": ["journals", "{}", "--audit"],
    "incident": [
        "incident",
        "{}",
        *["--at", "2026-11-24T00:00:00Z", "--since", "7d", "--against", "scheduler-0.32.0-tokens"],
    ],
    "diff": ["diff", "{}", "scheduler-0.32.0-tokens"],
}
"""Each command by the name of its file; ``{}`` is the folder of journals."""

SHOWN = 2
"""Of how many requests a corpus shows the account."""

AS_CSV = "scheduler-0.32.0-blocks"
"""The corpus whose outputs are written as CSV too."""


def corpora() -> list[str]:
    """The names of all corpora."""
    return [*sorted(path.name[:-7] for path in RECORDED.glob("*.tar.xz")), "histories"]


def unpacked(folder: Path, corpus: str) -> None:
    """Put the journals of a corpus into ``folder``."""
    if (folder / corpus).exists():
        return
    if corpus != "histories":
        with tarfile.open(RECORDED / f"{corpus}.tar.xz") as opened:
            opened.extractall(folder, filter="data")
        return
    journals.golden(folder / corpus)
    for path in sorted((folder / corpus).rglob("*")):
        os.utime(path, (WRITTEN_SECONDS, WRITTEN_SECONDS))


def printed(*words: str) -> tuple[object, str]:
    """The exit code and the standard output of a command."""
    from kvledger import cli

    out, before = io.StringIO(), sys.argv
    sys.argv = ["kvledger", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            cli.main()
    except SystemExit as exited:
        return exited.code, out.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("the command line returned")


def without_sentences(value: Any) -> Any:
    """``value`` without the sentences in it."""
    if isinstance(value, dict):
        return {key: without_sentences(item) for key, item in value.items() if key not in SENTENCES}
    return [without_sentences(item) for item in value] if isinstance(value, list) else value


def outputs(corpus: str) -> Iterator[tuple[str, str]]:
    """Each file's name and text. The current folder has the corpus, and that which ``diff`` compares with."""
    commands = dict(COMMANDS)
    _, out = printed(
        "query", corpus, "select request_id from requests order by request_id", "--format", "csv"
    )
    for number, request in enumerate(dict.fromkeys(out.split()[1 : 1 + SHOWN])):
        commands[f"show-{number}"] = ["show", "{}", request]
    for name, words in commands.items():
        words = [word.replace("{}", corpus) for word in words]
        code, out = printed(*words, "--format", "json")
        if out:
            out = json.dumps(without_sentences(json.loads(out)), indent=1, sort_keys=True) + "\n"
        yield f"{name}.json", f"exit code {code}\n{out}"
        if corpus == AS_CSV and name != "audit":  # whose lines are the sentences of findings
            code, out = printed(*words, "--format", "csv")
            yield f"{name}.csv", f"exit code {code}\n{out}"


def main() -> None:
    """Write all files."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        unpacked(Path(folder), "scheduler-0.32.0-tokens")
        for corpus in corpora():
            unpacked(Path(folder), corpus)
            (PRINTED / corpus).mkdir(parents=True, exist_ok=True)
            for name, text in outputs(corpus):
                (PRINTED / corpus / name).write_text(text)


if __name__ == "__main__":
    main()
