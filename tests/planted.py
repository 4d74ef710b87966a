"""Plants what is no plain file under every name that kvledger opens below a folder of journals."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import journals
from tests.histories import GOLDEN

from kvledger.audit.journal.format import LOCK, segment_name
from kvledger.audit.replay import checkpoint
from kvledger.exporters.facts import kept


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(12 << 30)


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without an end


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_a_pipe(path: Path) -> None:
    pipe = path.parent / ".pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe)


def _of_another_user(path: Path) -> None:
    path.write_bytes(bytes(64))
    path.chmod(0)
    os.chown(path, 65_533, 65_533)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "link": _link,
    "link to a pipe": _link_to_a_pipe,
    "folder": Path.mkdir,
    "sparse": _sparse,
    "device": _device,
    "of another user": _of_another_user,
}

OF_ROOT = (_device, _of_another_user)
"""What only root can make."""

IN_JOURNALS = (LOCK, segment_name(1), segment_name(2), "00000002.new")
BESIDE = ("engine", "worker", "events")


COMPACTED = ("engine-10-9-0", "engine-11-9-0", "engine-12-9-0")


def names(folder: Path) -> Iterator[Path]:
    """Every name that is opened below a folder of journals; one for each journal, so that each is seen."""
    for kind in BESIDE:
        for number, name in enumerate(IN_JOURNALS, 1):
            yield folder / f"{kind}-{number}-9-0" / name
    facts = folder / kept.FOLDER
    of_rows, of_session, of_lock = COMPACTED
    yield from facts.glob(f"*/*/*/{of_rows}.*")
    yield kept.place(folder / of_session)
    yield facts / f".{of_lock}.lock"
    state = folder / checkpoint.HIDDEN
    yield from (state / checkpoint.NAME, state / checkpoint.LOCK)


def plant(folder: Path, *makers: Callable[[Path], None]) -> None:
    """Write journals, and plant one thing under each name; several kinds of things take turns."""
    from kvledger.exporters.facts.compact import compact

    written = {path.parent for path in names(folder) if not path.parent.name.startswith(".")}
    for path in sorted(written | {folder / name for name in COMPACTED}):
        journals.write(path, GOLDEN[0].events(), configuration={"transfer": "t"})
    for name in COMPACTED:
        compact(folder / name)
    (folder / checkpoint.HIDDEN).mkdir(mode=0o700)
    for path, make in zip(list(names(folder)), itertools.cycle(makers), strict=False):
        path.unlink(missing_ok=True)
        make(path)
