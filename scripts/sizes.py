"""Prints lines of Python by folder: now, and in another commit. `make sizes`; ARGS names the commit.

Without ARGS it compares with the commit before the rooms became fewer.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "83ddd39d"
"""The commit before the rooms became fewer."""

KINDS = {"tests": "tests", "proofs": "rest", "benchmarks": "rest", "scripts": "rest", "docs": "rest"}
"""What a top-level folder counts as. Every other one is product."""

DEEP = {"audit", "exporters", "tests"}
"""Top-level folders that are printed by subfolder."""


def lines(commit: str | None) -> Counter[str]:
    """Lines of Python by file, in a commit, or in the work tree (None)."""
    if commit is None:
        names = git("ls-files", "*.py").splitlines()
        files = [ROOT / name for name in names if not (ROOT / name).is_symlink()]
        return Counter(
            {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in files if path.is_file()}
        )
    listed = (row.split(maxsplit=3) for row in git("ls-tree", "-r", commit).splitlines())
    blobs = {name: blob for mode, _, blob, name in listed if name.endswith(".py") and mode != "120000"}
    answer = git("cat-file", "--batch", text="\n".join(blobs.values()) + "\n").encode()
    found: Counter[str] = Counter()
    for name in blobs:
        head, _, answer = answer.partition(b"\n")
        size = int(head.split()[2])
        found[name], answer = answer[:size].count(b"\n"), answer[size + 1 :]
    return found


def git(*words: str, text: str = "") -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, input=text, capture_output=True, text=True, check=True
    ).stdout


def by_folder(files: Counter[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Files and lines by kind and folder."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for name, count in files.items():
        parts = name.split("/")[:-1]
        folder = "/".join(parts[: 2 if parts and parts[0] in DEEP else 1]) or "."
        kind = KINDS.get(parts[0] if parts else "", "product")
        number, total = sums.get((kind, folder), (0, 0))
        sums[kind, folder] = number + 1, total + count
    return sums


def add(sums: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Files and lines in all."""
    files, total = 0, 0
    for one, count in sums:
        files, total = files + one, total + count
    return files, total


def main(commit: str = BEFORE) -> None:
    """Print the table."""
    now, before = by_folder(lines(None)), by_folder(lines(commit))
    print(f"{'':10}{'folder':24}{'files':>7}{'lines':>9}{commit:>12}{'lines':>9}{'change':>9}")
    for kind in ("product", "tests", "rest"):
        keys = sorted(key for key in now.keys() | before.keys() if key[0] == kind)
        rows = [(key[1], now.get(key, (0, 0)), before.get(key, (0, 0))) for key in keys]
        whole = "in all", add(row[1] for row in rows), add(row[2] for row in rows)
        for name, one, other in [*rows, whole]:
            print(f"{kind:10}{name:24}{one[0]:7}{one[1]:9,}{other[0]:12}{other[1]:9,}{one[1] - other[1]:+9,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
