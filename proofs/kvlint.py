"""Gives the requests of the proof ``turns`` to kvlint, which reads prompts, and compares what both say.

kvlint (PyPI) simulates a prefix cache over a log of requests, and names by rules what breaks a prefix. It
knows no engine. It is installed into an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvledger.audit.analysis.turns import Turn

VERSION = "0.1.1"
HEADS = (
    "planted", "turns", "rules of kvlint", "hits it predicts",
    "hits that the engine had", "predicted too high", "with our cause",
)  # fmt: skip


class Linted(NamedTuple):
    """What kvlint says of a request."""

    cached: int
    rules: tuple[str, ...]


def install(folder: Path) -> Path:
    """The program, in an environment of its own in this folder."""
    place = folder / "kvlint"
    if not (place / "bin" / "kvlint").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        python = str(place / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", f"kvlint=={VERSION}"]
        subprocess.run(install, check=True, capture_output=True)
    return place / "bin" / "kvlint"


def lint(program: Path, server: Path, asked: Sequence[str], block: int) -> dict[str, Linted]:
    """What kvlint says of the requests of one server, by name. ``asked``: their bodies, as JSON, in order."""
    bodies = [json.loads(line) for line in asked]
    log, found = server / "kvlint.jsonl", server / "kvlint.json"
    lines = [json.dumps({**body, "request_id": body["user"]}) for body in bodies]
    log.write_text("".join(f"{line}\n" for line in lines))
    options = ["--model", str(server / "model"), "--block-size", str(block), "--json", str(found)]
    subprocess.run([program, "lint", log, *options], check=True, capture_output=True)
    report = json.loads(found.read_text())
    rules: dict[str, list[str]] = {}
    for finding in report["findings"]:
        for name in finding["affected_request_ids"]:
            rules.setdefault(name, []).append(finding["rule_id"])
    blocks = report["sims"][0]["per_request"]
    return {
        body["user"]: Linted(
            row["cached_tokens"],
            tuple(rules.get(body["user"], ())),
        )
        for body, row in zip(bodies, blocks, strict=True)
    }


def compare(
    planted: Mapping[str, str],
    hits: Mapping[str, int],
    linted: Mapping[str, Linted],
    told: Mapping[str, Turn],
) -> Iterator[str]:
    """The table. By request: what was planted, the hits that the server reports, and what both say."""
    rows: dict[str, Counter[str]] = {}
    rules: dict[str, Counter[str]] = {}
    for name, kind in planted.items():
        row, said, turn = rows.setdefault(kind, Counter()), linted[name], told[name]
        rules.setdefault(kind, Counter()).update(said.rules)
        row["turns"] += 1
        row["predicted"] += said.cached
        row["hit"] += hits[name]
        high = said.cached > hits[name]
        row["high"] += high
        row["why"] += high and bool(turn.lost.keys() - {"below_block"})
    yield f"| {' | '.join(HEADS)} |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    for kind, row in rows.items():
        named = ", ".join(f"{rule} ({count:,})" for rule, count in sorted(rules[kind].items())) or "none"
        yield (
            f"| {kind} | {row['turns']:,} | {named} | {row['predicted']:,} | {row['hit']:,} | "
            f"{row['high']:,} | {row['why']:,} |"
        )
