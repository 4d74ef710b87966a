"""A journal whose requests have labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests import journals
from tests.histories import weave

from kvledger.audit import events as ev

LABELS = (
    ev.RequestLabels(lora="french", salt_class=-1, group="a", priority=5),
    ev.RequestLabels(lora="french", salt_class=2, group="b"),
    None,
)
"""The labels of the requests 0, 1 and 2."""


WORDS = "A0+0 s10 o+ F b.A0+0 b.s10 b.o+ b.P b.A0+0 b.s11 b.o+ b.F c.A0+0 c.s10 c.o+ c.F"


def labelled(path: Path) -> Path:
    """Write three requests of ten prompt tokens, one after the other; the second one is preempted."""
    stream: list[Any] = []
    for event in weave({0: 10, 1: 10, 2: 10}, WORDS):
        if isinstance(event, ev.RequestAdded):
            labels = LABELS[event.request]
            event = replace(event, labels=labels, priority=labels.priority if labels else 0)
        stream.append(event)
    return journals.write(path, stream, configuration={"engine_index": 3})
