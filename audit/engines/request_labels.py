"""The labels of a request: LoRA adapter, priority, class of the cache salt, group and session.

The operator chooses groups by ``KVLEDGER_GROUP``, a regular expression over request ids. The session is
vLLM's ``session_id`` (since 0.32), else what ``KVLEDGER_SESSION`` finds in the request id. Labels are read
once for a request, when it arrives, and for each living request at the beginning of a segment.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from .. import events as ev
from ..text import cut_id, cut_priority
from .pool.isolation import IsolationClasses

logger = logging.getLogger("kvledger")

GROUP, SESSION = "KVLEDGER_GROUP", "KVLEDGER_SESSION"

MOST_GROUPS = 64
"""Requests of further groups get the label ``other``."""

OTHER = "other"

CHARACTERS = 64
"""A label is cut to this length."""

SEARCHED = 256
"""The pattern sees so many characters of a request id: a client may choose the id and its length."""


def pattern(variable: str) -> re.Pattern[str] | None:
    """The pattern in an environment variable; None if it is not set, or no regular expression."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        logger.warning("kvledger ignores %s, which is no regular expression: %s", variable, error)
        return None


class LabelReader:
    """Reads the labels of vLLM's requests. ``classes`` makes the class of a cache salt."""

    def __init__(
        self,
        classes: IsolationClasses,
        groups: re.Pattern[str] | None = None,
        sessions: re.Pattern[str] | None = None,
    ) -> None:
        self._classes = classes
        self._group_in = groups
        """Finds the group in a request id; None: requests have no group."""
        self._session_in = sessions
        """Finds the session in a request id; None: only vLLM names sessions."""
        self._groups: set[str] = set()

    def of(self, request: Any) -> ev.RequestLabels | None:
        """The labels of a request; None if it has none, or they can't be read. Never raises."""
        try:
            adapter = getattr(request, "lora_request", None)
            salt = getattr(request, "cache_salt", None)
            lora = _cut(str(adapter.lora_name)) if adapter else ""
            group = self._group(request.request_id) if self._group_in is not None else ""
            priority = cut_priority(getattr(request, "priority", 0))
            session = getattr(request, "session_id", None)
            if not session and self._session_in is not None:
                session = _found(self._session_in, request.request_id)
            if not (lora or salt or group or priority or session):
                return None
            salt_class = self._classes.of_salt(salt) if salt else 0
            return ev.RequestLabels(lora, salt_class, group, priority, _encodable(cut_id(session or "")))
        except Exception:  # an observer must never stop the engine; the request's labels are unknown
            return None

    def _group(self, request_id: str) -> str:
        assert self._group_in is not None
        group = _cut(_found(self._group_in, request_id))
        if group and group not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                return OTHER
            self._groups.add(group)
        return group


def _found(pattern: re.Pattern[str], request_id: str) -> str:
    """What a pattern's first group matches in a request id, else the whole match; "": nothing."""
    match = pattern.search(request_id[:SEARCHED])
    if match is None:
        return ""
    return (match[1] or "") if pattern.groups else match[0]


def _cut(text: str) -> str:
    """The beginning of a text, without what can't be encoded."""
    return _encodable(text[:CHARACTERS])


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
