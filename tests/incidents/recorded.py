"""The journals of the planted incidents; ``python -m tests.incidents.recorded`` drives them again."""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from tests.incidents.planted import CONTROLS, PLANTED, Incident

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


def main() -> None:
    """Drive every incident and write the archive."""
    logging.disable(logging.ERROR)  # vLLM reports every failed load
    os.environ["KVLEDGER_GROUP"] = GROUPS
    with tempfile.TemporaryDirectory() as name, tarfile.open(RECORDED, "w:xz", preset=9) as archive:
        for incident in (PLANTED | CONTROLS).values():
            incident.write(Path(name, _folder(incident)))
        for path in sorted(Path(name).rglob("*.kvl")):
            member = tarfile.TarInfo(str(path.relative_to(name)))
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    main()
