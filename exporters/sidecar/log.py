"""The sidecar's log on standard error: sentences, logfmt or JSON, as ``--log.format`` chooses.

The keys and levels are those of Prometheus's own programs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TextIO

from ...audit.text import printable

LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("text", "logfmt", "json")


class Log:
    """Writes one line per sentence. A call logs a problem, :meth:`info` what is as it should be."""

    def __init__(self, level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
        self._least = LEVELS.index(level)
        """The lowest level that is written, as an index in ``LEVELS``."""
        self._format = format
        """One of ``FORMATS``."""
        self._stream = stream
        """Where lines go; None: the standard error of the moment."""

    def __call__(self, sentence: str) -> None:
        """Log a problem."""
        self._write("warn", sentence)

    def info(self, sentence: str) -> None:
        """Log the course of things."""
        self._write("info", sentence)

    def _write(self, level: str, sentence: str) -> None:
        if LEVELS.index(level) >= self._least:
            print(self._line(level, printable(sentence)), file=self._stream or sys.stderr, flush=True)

    def _line(self, level: str, sentence: str) -> str:
        if self._format == "text":
            return sentence
        now = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        fields = {
            "time": f"{seconds}.{int(now * 1000) % 1000:03}Z",
            "level": level.upper(),
            "msg": sentence,
        }
        if self._format == "json":
            return json.dumps(fields)
        fields["msg"] = json.dumps(sentence, ensure_ascii=False)
        return " ".join(f"{name}={value}" for name, value in fields.items())
