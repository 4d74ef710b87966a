"""Drives the real engine of SGLang's releases with loads, and compares what the audit finds with what is due.

Usage: .venv/bin/python scripts/sglang_matrix.py [--write] [NAME...]    all releases, or these, or `core`

The releases are those of scripts/releases.py whose names begin with `sglang-`; the loads are those of
audit/demo/sglang/loads.py. Each cell is the verdict, and the findings that are no drifts. `--write` writes
docs/reference/sglang.md after a run of all releases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from releases import BIN, CORE_SGLANG, ROOT, SGLANG, build, environ

PAGE = ROOT / "docs" / "reference" / "sglang.md"

ALL = (
    "plain",
    "pressure",
    "cold",
    "overlap",
    "abort",
    "overlap-abort",
    "mixed",
    "random",
    "priority",
    "turns",
)
HOST = ("host", "host-back", "host-random", "host-overlap")
LOADS: dict[str, tuple[str, ...]] = {
    "sglang-0.5.3": ALL,  # its host pool insists on pinned memory
    "sglang-0.5.3.post3": ALL,  # as above
    "sglang-0.5.5.post3": (*ALL, *HOST),
    "sglang-0.5.6": (*ALL, "pause", "pause-weights", *HOST),
    "sglang-0.5.7": (*ALL, "pause", "pause-weights"),
    "sglang-0.5.10": (*ALL, "session", "private", "pause", "pause-weights", *HOST),
    "sglang-0.5.12.post1": (*ALL, "session", "private", "pause", "pause-weights", *HOST),
    "sglang-0.5.13": (*ALL, "session", "private", "pause", "pause-weights", *HOST),
    "sglang-0.5.20": (*ALL, "session", "private", "pause", "pause-weights", *HOST, "host-tight"),
    "sglang-0.5.23": (*ALL, "paged", "session", "private", "pause", "pause-weights", *HOST, "host-tight"),
}
"""The loads that each release can run on a CPU."""

COUNTED_AGAIN = frozenset(("tokens/negative", "tokens/set-once"))
"""Findings of SGLang#11900: the cached tokens of a request are added again when it resumes."""

LOST = frozenset(("pool/slots",))
"""The finding of SGLang#11970: a retraction loses a slot under overlap. The idle engine notices, and ends.

And of SGLang#22273: a turn that is refused for its length takes the place of its session's KV.
"""

AGAIN = frozenset(("tokens/unexplained-drop",))
"""The finding of SGLang#36855: a chunk is computed again and again, until the engine ends without room."""

DUE: dict[tuple[str, str], frozenset[str]] = {
    **{
        (release, load): COUNTED_AGAIN if load in ("pressure", "overlap") else frozenset(("tokens/set-once",))
        for release in ("sglang-0.5.3", "sglang-0.5.3.post3", "sglang-0.5.5.post3")
        for load in ("pressure", "overlap", "random", "priority")
    },
    ("sglang-0.5.3.post3", "overlap"): COUNTED_AGAIN | LOST,
    ("sglang-0.5.3.post3", "random"): frozenset(("tokens/set-once",)) | LOST,
    ("sglang-0.5.10", "session"): LOST,
    **{(f"sglang-{release}", "private"): AGAIN for release in ("0.5.12.post1", "0.5.13", "0.5.20")},
    **{("sglang-0.5.5.post3", load): COUNTED_AGAIN for load in ("host-random", "host-overlap")},
    **{
        (f"sglang-{release}", "pause-weights"): frozenset(("weights/reset-refused",))
        for release in ("0.5.10", "0.5.12.post1", "0.5.13", "0.5.20")
    },
}
"""The findings that a load shows in a release; every other one shows none."""


class Cell(NamedTuple):
    """One load in one release."""

    release: str
    load: str
    verdict: str
    found: frozenset[str]
    named: frozenset[tuple[str, str | None]]
    """Findings with the requests that they name."""
    doubts: tuple[str, ...]
    told: Mapping[str, Mapping[str, Any]]
    """What the client was told of each request."""
    totals: Mapping[str, int]

    @property
    def wrong(self) -> str:
        """What is not as it should be; "" if nothing."""
        due = DUE.get((self.release, self.load), frozenset())
        if self.found != due:
            return f"found {sorted(self.found)}, due {sorted(due)}"
        if self.doubts and not (LOST | AGAIN) & due:
            return "; ".join(self.doubts)
        return "" if self.verdict == ("violated" if due else "clean") else self.verdict


def cells(release: str, loads: Sequence[str], folder: Path) -> list[Cell]:
    """Drive the loads in a release, and audit their journals in ``folder``."""
    from kvledger.audit.demo.sglang.run import ENVIRON, write_endless_model
    from kvledger.audit.replay.journals import audit_paths

    model = folder / "model"
    write_endless_model(model)
    given = environ(release) | ENVIRON | {"KVLEDGER_DIR": str(folder)}
    given["PYTHONPATH"] = os.pathsep.join((given["PYTHONPATH"], str(ROOT / "src")))
    command = [str(BIN / "python"), "-m", "kvledger.audit.demo.sglang", "--model", str(model), *loads]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"load"')]
    if done.returncode or len(rows) != len(loads):
        sys.exit(f"{release}: {len(rows)} of {len(loads)} loads ran.\n{done.stderr[-4000:]}")
    made = []
    for row in rows:
        audit = audit_paths([folder / row["journal"]]).engines[0]
        violations = [each for each in audit.violations if each.severity == "violation"]
        totals = audit.totals()
        made.append(
            Cell(
                release,
                row["load"],
                audit.verdict,
                frozenset(each.id for each in violations),
                frozenset((each.id, each.request) for each in violations),
                tuple(audit.doubts) + ((row["failed"],) if row["failed"] else ()),
                row["told"],
                {
                    name: totals.of(name)
                    for name in ("requests", "preemptions", "rework", "local", "external")
                },
            )
        )
    return made


def page(found: Sequence[Cell]) -> str:
    """docs/reference/sglang.md."""
    releases = list(dict.fromkeys(cell.release for cell in found))
    loads = list(dict.fromkeys(load for row in LOADS.values() for load in row))
    by_place = {(cell.release, cell.load): cell for cell in found}
    lines = [
        "# SGLang's releases",
        "",
        "Generated by `scripts/sglang_matrix.py --write`; do not edit. Each cell is one load of",
        "`audit/demo/sglang/loads.py` on the real engine of the release, on a CPU: the verdict, requests,",
        "preemptions and recomputed tokens (rework), and the findings, without drifts. *-*: the load can't",
        "run there on a CPU. [sglang.md](../sglang.md) says what is observed.",
        "",
        "| load | " + " | ".join(name.removeprefix("sglang-") for name in releases) + " |",
        "|---" * (len(releases) + 1) + "|",
    ]
    for load in loads:
        row = [_text(by_place.get((release, load))) for release in releases]
        lines.append(f"| `{load}` | " + " | ".join(row) + " |")
    lines += [
        "",
        "`tokens/negative` and `tokens/set-once` are",
        "[SGLang#11900](https://github.com/sgl-project/sglang/pull/11900), `pool/slots` is",
        "[SGLang#11970](https://github.com/sgl-project/sglang/issues/11970), in `session`",
        "[SGLang#22273](https://github.com/sgl-project/sglang/pull/22273). `weights/reset-refused` is",
        "[SGLang#33783](https://github.com/sgl-project/sglang/issues/33783), `tokens/unexplained-drop`",
        "[SGLang#36855](https://github.com/sgl-project/sglang/issues/36855).",
        "",
    ]
    return "\n".join(lines)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    totals = cell.totals
    counts = f"{totals['requests']}, {totals['preemptions']}, {totals['rework']}"
    return "; ".join([f"{cell.verdict} ({counts})", *(f"`{id}`" for id in sorted(cell.found))])


def main(arguments: Sequence[str]) -> int:
    write = "--write" in arguments
    words = [word for word in arguments if word != "--write"]
    names = [name for word in words or SGLANG for name in (CORE_SGLANG if word == "core" else [word])]
    build(names)
    found: list[Cell] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for cell in cells(name, LOADS[name], Path(folder)):
                found.append(cell)
                print(f"{name:20} {cell.load:14} {_text(cell)}", flush=True)
    wrong = [cell for cell in found if cell.wrong]
    for cell in wrong:
        print(f"not as expected: {cell.release}: {cell.load}: {cell.wrong}")
    if write and not words:
        PAGE.write_text(page(found))
    print(f"{len(names)} releases of SGLang, {len(found)} loads, {len(wrong)} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
