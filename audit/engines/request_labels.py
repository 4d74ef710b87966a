"""The labels of a request: LoRA adapter, priority, class of the cache salt, and the operator's group.

The operator chooses groups by ``KVLEDGER_GROUP``, a regular expression over request ids. Labels are read once
for a request, when it arrives, and for each living request at the beginning of a segment.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from .. import events as ev
from ..text import cut_priority
from .pool.isolation import IsolationClasses

logger = logging.getLogger("kvledger")

MOST_GROUPS = 64
"""Requests of further groups get the label ``other``."""

OTHER = "other"

CHARACTERS = 64
"""A label is cut to this length."""

SEARCHED = 256
"""The pattern sees so many characters of a request id: a client may choose the id and its length."""


def group_pattern() -> re.Pattern[str] | None:
    """``$KVLEDGER_GROUP``; None if it is not set, or no regular expression."""
    text = os.environ.get("KVLEDGER_GROUP")
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        logger.warning("kvledger records no groups: KVLEDGER_GROUP is no regular expression: %s", error)
        return None


class LabelReader:
    """Reads the labels of vLLM's requests. ``classes`` makes the class of a cache salt."""

    def __init__(self, classes: IsolationClasses, pattern: re.Pattern[str] | None = None) -> None:
        self._classes = classes
        """Makes the class of a cache salt."""
        self._pattern = pattern
        """Finds the group in a request id; None: requests have no group."""
        self._groups: set[str] = set()
        """The groups seen so far."""

    def of(self, request: Any) -> ev.RequestLabels | None:
        """The labels of a request; None if it has none, or they can't be read. Never raises."""
        try:
            adapter = getattr(request, "lora_request", None)
            salt = getattr(request, "cache_salt", None)
            lora = _cut(str(adapter.lora_name)) if adapter else ""
            group = self._group(request.request_id) if self._pattern is not None else ""
            priority = cut_priority(getattr(request, "priority", 0))  # v1 of 0.9.1 has none
            if not (lora or salt or group or priority):
                return None
            return ev.RequestLabels(lora, self._classes.of_salt(salt) if salt else 0, group, priority)
        except Exception:  # an observer must never stop the engine; the request's labels are unknown
            return None

    def _group(self, request_id: str) -> str:
        assert self._pattern is not None
        match = self._pattern.search(request_id[:SEARCHED])
        if match is None:
            return ""
        group = _cut((match[1] or "") if self._pattern.groups else match[0])
        if group and group not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                return OTHER
            self._groups.add(group)
        return group


def _cut(text: str) -> str:
    """The beginning of a text, without what can't be encoded."""
    return text[:CHARACTERS].encode(errors="replace").decode()
