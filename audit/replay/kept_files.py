"""Files that ``kvledger compact`` keeps beside the journals, and that stay when the journals are removed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..journal.folder import may_be_host
from ..journal.hosts import HostJournal

FOLDER = ".kvledger-rollups"
"""The folder beside the journals."""


def left_behind(folder: Path, suffix: str) -> list[Path]:
    """The files of journals that are gone, in a folder of journals and in the folders of hosts below it."""
    with contextlib.suppress(OSError):
        paths = sorted((folder / FOLDER).glob(f"*{suffix}"))
        for path in sorted(folder.glob(f"*/{FOLDER}/*{suffix}")):
            host = path.parent.parent
            if may_be_host(host):
                paths.append(HostJournal.of(path, host.name))
        return [path for path in paths if not (path.parent.parent / path.name.removesuffix(suffix)).exists()]
    return []
