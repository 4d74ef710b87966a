"""Recorders with new journals in ``$KVLEDGER_DIR``, for the plugin."""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..journal.recorder import Recorder

logger = logging.getLogger("kvledger")

_counter = itertools.count()


def recorder_in_folder(prefix: str) -> Recorder:
    """A recorder with a new journal in ``$KVLEDGER_DIR``, after old journals have made room for it."""
    from ..journal.recorder import Recorder
    from ..journal.retention import limits, make_room

    name = f"{prefix}-{time.time_ns() // 1_000_000}-{os.getpid()}-{next(_counter)}"
    folder, bounds = Path(os.environ["KVLEDGER_DIR"]), limits()
    for removed in make_room(folder, bounds.folder_bytes):
        logger.info("kvledger removed the journal of an ended engine, %s", removed.name)
    return Recorder(folder / name, bounds)
