"""The journals of the planted incidents, recorded once, and what `kvledger incident` says of each.

``python -m tests.incidents.recorded`` prints a table of what was planted and what is said; it exits with 1 if
another cause is said first, or if one is said of a quiet time. ``--record`` drives the real schedulers again
before.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import shutil
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from tests.incidents.planted import CONTROLS, PLANTED, Incident

from kvledger.exporters.reports.incident import Incident as Found
from kvledger.exporters.reports.incident import incident as named

RECORDED = Path(__file__).parent / "recorded.tar.xz"
GROUPS = "^([a-z]+)-"
"""How the group of a request is found in its id."""


def _folder(incident: Incident) -> str:
    (name,) = (name for name, each in (PLANTED | CONTROLS).items() if each is incident)
    return re.sub(r"\W+", "-", name)


@cache
def _unpacked() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvledger-incidents-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(RECORDED) as opened:
        opened.extractall(folder, filter="data")
    return folder


def recorded(incident: Incident) -> Path:
    """The folder of an incident's journals."""
    return _unpacked() / _folder(incident)


def said(incident: Incident) -> Found:
    """What `kvledger incident` finds in an incident."""
    return named([recorded(incident)], since=incident.since, at=incident.at)


def record() -> None:
    """Drive every incident and write the archive."""
    logging.disable(logging.ERROR)  # vLLM reports every failed load
    with tempfile.TemporaryDirectory() as name, tarfile.open(RECORDED, "w:xz", preset=9) as archive:
        for incident in (PLANTED | CONTROLS).values():
            incident.write(Path(name, _folder(incident)))
        for path in sorted(Path(name).rglob("*.kvl")):
            member = tarfile.TarInfo(str(path.relative_to(name)))
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))


def main() -> int:
    """Print the table."""
    os.environ["KVLEDGER_GROUP"] = GROUPS
    if "--record" in sys.argv[1:]:
        record()
    wrong = 0
    print("| planted | said first |\n|---|---|")
    for name, incident in (PLANTED | CONTROLS).items():
        causes = said(incident).causes
        first = causes[0] if causes else None
        right = incident.cause == (first.name if first else "") and incident.says in (
            first.text if first else ""
        )
        wrong += not right
        print(f"| {name} | {'' if right else 'WRONG: '}{first.text if first else 'nothing'} |", flush=True)
    print(f"\n{len(PLANTED)} incidents and {len(CONTROLS)} quiet times, {wrong} wrong.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
