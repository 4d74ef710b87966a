"""How OTLP over HTTP asks a collector: nothing of its answer is read but the status and the headers.

A collector's answer may have no end. The SDK's exporters read it whole, and need none of it.
"""

from __future__ import annotations

from typing import Any

import requests


class StatusOnly(requests.Session):
    """A session for the SDK's exporters: it follows no redirect and reads no body."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send one request; the connection ends with the headers of the answer."""
        answer = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        answer.close()
        answer._content = b""
        return answer
