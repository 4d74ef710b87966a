"""Who calls a block pool: the request, the KV cache group and the engine's own operation.

A pool's methods are told blocks and no names. Around them stands one method a request and step,
``allocate_slots`` and its like: to hook these would cost more than everything else together, and the
pool is not even called by most of them. So the caller is read off the stack, where the pool *is*
called: the manager of a single group has its group, and ``request_id`` is its parameter.

Only the direct caller is asked, and only for parameters: what stands further up may be of any time.
"""

from __future__ import annotations

import sys
import traceback
from types import CodeType, FrameType
from typing import Any, NamedTuple

STACK_LINES = 12
"""Lines of a Python stack that are kept, the innermost ones."""

MANAGER, REQUEST, PASSED_ON, OTHER = "manager", "request", "passed on", "other"


class Caller(NamedTuple):
    """``request_id`` None: no table of a request is concerned. ``group`` -1: not told by the caller."""

    request_id: str | None
    group: int
    by: str


NOBODY = Caller(None, -1, "")


class Callers:
    """Reads callers, remembering of each code object what sort it is. ``ours``: modules to look past."""

    def __init__(self, *ours: str) -> None:
        self._ours = frozenset(ours)
        self._sorts: dict[int, str] = {}
        """By the id of a code object: its own hash is worked out anew each time, from all its constants."""
        self._seen: list[CodeType] = []
        """Held, so that no other code object gets the id."""

    def caller(self) -> Caller:
        """Of the pool's method that is wrapped by whoever asks."""
        frame: FrameType | None = sys._getframe(2)
        sorts = self._sorts
        while frame is not None:
            code = frame.f_code
            sort = sorts.get(id(code)) or self._sort(frame)
            if sort is MANAGER:
                known = frame.f_locals
                group = getattr(known.get("self"), "kv_cache_group_id", None)
                if group is None:
                    return Caller(None, -1, code.co_name)
                return Caller(known["request_id"], group, code.co_name)
            if sort is REQUEST:
                return Caller(frame.f_locals["request"].request_id, -1, code.co_name)
            if sort is OTHER:
                return Caller(None, -1, code.co_name)
            frame = frame.f_back
        return NOBODY

    def _sort(self, frame: FrameType) -> str:
        code = frame.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if frame.f_globals.get("__name__") in self._ours or code.co_name == "free_blocks":
            sort = PASSED_ON  # our own, or one pool that hands on what is another's
        elif "self" in parameters and "request_id" in parameters:
            sort = MANAGER
        elif code.co_name == "allocate_slots":  # up to 0.12 it touches the hits itself
            sort = REQUEST
        else:
            sort = OTHER
        self._seen.append(code)
        self._sorts[id(code)] = sort
        return sort

    def stack(self) -> list[str]:
        """The Python stack outside of our own modules, innermost last: a line a frame."""
        frames: list[Any] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(frames) < STACK_LINES:
            if frame.f_globals.get("__name__") not in self._ours:
                frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        summary = traceback.StackSummary.extract(iter(reversed(frames)), lookup_lines=False)
        return [f"{row.filename}:{row.lineno} {row.name}" for row in summary]
