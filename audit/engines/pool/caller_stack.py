"""Who calls a block pool: the request, the KV cache group and the engine's operation, read off the stack.

A pool's methods receive blocks and no request. Hooking the methods that call them, such as
``allocate_slots``, would cost more than all other hooks together: each runs once per request and step, and
most of these calls do not reach the pool. So the caller is read off the stack when the pool is called: the
manager of a single group has its group number, and ``request_id`` is a parameter of the manager's method.

Only the direct caller is read, and only its parameters: a frame further up may be about another request.
"""

from __future__ import annotations

import sys
import traceback
from types import CodeType, FrameType
from typing import Any, NamedTuple

STACK_LINES = 12
"""Lines of a Python stack that are kept, the innermost ones."""

MANAGER, PASSED_ON, OTHER = "manager", "passed on", "other"
"""Kinds of callers: a manager's method with a ``request_id``; a frame that passes the call on; any other."""


class Caller(NamedTuple):
    """Who called a pool. ``request_id`` None: for no request. ``group`` -1: the caller has no group."""

    request_id: str | None
    group: int
    by: str


NOBODY = Caller(None, -1, "")


class Callers:
    """Reads callers off the stack. Frames of modules whose names begin with one of ``ours`` are skipped."""

    def __init__(self, *ours: str) -> None:
        self._ours = ours
        self._kinds: dict[int, str] = {}
        """The kind of each code object, by its id: hashing the object itself would hash all its constants."""
        self._codes: list[CodeType] = []
        """The same code objects, kept alive so that their ids are not reused."""

    def caller(self) -> Caller:
        """The caller of the wrapped pool method, for the function that records the call."""
        frame: FrameType | None = sys._getframe(2)
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code)) or self._kind(frame)
            if kind is MANAGER:
                parameters = frame.f_locals
                group = getattr(parameters.get("self"), "kv_cache_group_id", None)
                if group is None:
                    return Caller(None, -1, code.co_name)
                return Caller(parameters["request_id"], group, code.co_name)
            if kind is OTHER:
                return Caller(None, -1, code.co_name)
            frame = frame.f_back
        return NOBODY

    def _kind(self, frame: FrameType) -> str:
        code = frame.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if self.is_ours(frame) or code.co_name == "free_blocks":
            kind = PASSED_ON  # kvledger's own, or a pool that passes on another pool's blocks
        elif "self" in parameters and "request_id" in parameters:
            kind = MANAGER
        else:
            kind = OTHER
        self._codes.append(code)
        self._kinds[id(code)] = kind
        return kind

    def is_ours(self, frame: FrameType) -> bool:
        """Whether a frame is one of kvledger."""
        return str(frame.f_globals.get("__name__")).startswith(self._ours)

    def stack(self) -> list[str]:
        """The Python stack without kvledger's modules, innermost last: a line for each frame."""
        frames: list[Any] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(frames) < STACK_LINES:
            if not self.is_ours(frame):
                frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        summary = traceback.StackSummary.extract(iter(reversed(frames)), lookup_lines=False)
        return [f"{row.filename}:{row.lineno} {row.name}" for row in summary]
