"""What ``kvledger doctor`` says about level ``content``: which groups of KV caches are checked, and why not.

Without an engine only vLLM's source files tell. What an engine really had is in the newest journal.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from ..engines.content.layout import CHECKED_SPECS, STATES
from ..engines.source_files import cache_declarations
from ..errors import LedgerError
from ..events import ContentWatched
from ..journal.catalogue import ENGINE, WORKER, Catalogue
from ..journal.listing import content_watch

JOURNALS_LOOKED_AT = 16
"""The newest journals that are searched for one of level ``content``."""

_REASONS = {
    "CircularBufferSpec": "blocks are rewritten in place",
    "CrossAttentionSpec": "blocks belong to encoder inputs",
    "EncoderOnlyAttentionSpec": "it has no KV cache",
}


class ContentsDiagnosis(msgspec.Struct, frozen=True):
    """Level ``content`` in this environment. ``problem``: why it would check nothing; "" if it would."""

    problem: str
    places: str
    """What tells where a block lies."""
    form: str
    """What computes fingerprints."""
    checked: list[str]
    """Kinds of groups that are checked, by vLLM's class names."""
    not_checked: dict[str, str]
    """Other kinds in this release, and why they are not checked."""
    journal: str = ""
    """The newest journal of level ``content``."""
    groups: list[str] = []
    """The groups that were checked there, and how their KV caches lay in memory."""
    excluded: list[str] = []
    """A sentence for each group that was not checked there, or for all."""
    recomputed: str = ""
    """Whether blocks that are computed again were compared there; "" if nobody asked for it."""


def diagnose_contents(directory: str | None) -> ContentsDiagnosis:
    """Examine this environment, and the newest journal in ``directory``."""
    found = cache_declarations()
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    journal, watched = newest_watch(Path(directory)) if directory else ("", None)
    return ContentsDiagnosis(
        problem=f"{missing[0]} is not installed" if missing else "" if found else _UNKNOWN,
        places="" if found is None else "strides of KVCacheTensor" if found.strides else _SHAPES,
        form="Triton on a GPU, NumPy on a CPU" if find_spec("triton") else "torch on a GPU, NumPy on a CPU",
        checked=[name for name in found.specs if name in (*CHECKED_SPECS, STATES)] if found else [],
        not_checked={
            name: _REASONS.get(name, "kvledger does not know how its blocks are filled")
            for name in (found.specs if found else ())
            if name not in (*CHECKED_SPECS, STATES)
        },
        journal=journal,
        groups=[] if watched is None else group_sentences(watched),
        excluded=[] if watched is None else watched.excluded,
        recomputed="" if watched is None else watched.recomputed,
    )


_UNKNOWN = "this release does not declare its KV caches in vllm/v1/kv_cache_interface.py"
_SHAPES = "shapes that attention backends declare"


def newest_watch(directory: Path) -> tuple[str, ContentWatched | None]:
    """The newest journal in which a worker checked contents or said why not: its name, and what it said."""
    try:
        folders = Catalogue(directory).newest_first(ENGINE, WORKER)
    except OSError:
        return "", None
    for folder in folders[:JOURNALS_LOOKED_AT]:
        try:
            watched = content_watch(folder)
        except (LedgerError, OSError):  # a live engine may remove a segment meanwhile
            continue
        if watched is not None:
            return folder.name, watched
    return "", None


def group_sentences(watched: ContentWatched) -> list[str]:
    """One sentence for each group that is checked."""
    rows = watched.groups
    layouts = [*watched.layouts, *[""] * (len(rows) // 4)]
    sentences = []
    for index in range(0, len(rows) - 3, 4):
        group, tokens, layers, size = rows[index : index + 4]
        how = f"; {layouts[index // 4]}" if layouts[index // 4] else ""
        sentences.append(
            f"group {group}: {watched.blocks:,} blocks of {tokens} tokens and {size:,} bytes, "
            f"{layers} {'tensor' if layers == 1 else 'tensors'}{how}"
        )
    return sentences
