"""The one HTTP client: asks an engine's own pages, in bounded time and memory.

It follows no redirect to another host, goes through no proxy, and prints no password: a URL may have one
(``http://user:password@host/metrics``), which is sent as a header and stands in no sentence.
"""

from __future__ import annotations

import base64
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from ..audit.errors import LedgerError
from ..audit.text import printable

TIMEOUT_SECONDS = 5.0
"""How long a whole answer may take."""

MOST_BYTES = 32 << 20
_READ_BYTES = 64 << 10
NOTHING: Mapping[str, str] = MappingProxyType({})


def _split(url: str, what: str = "a server", example: str = "http://localhost:8000") -> SplitResult:
    try:
        found = urlsplit(url)
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:
            return found
    except ValueError:  # a port that is none
        pass
    raise LedgerError(f"{shown(url)!r} is no URL of {what}; an example is {example}.")


def shown(url: str) -> str:
    """A URL as it is printed: without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2].partition("?")[0]
    path = path.partition("?")[0].partition("#")[0]
    return printable(f"{scheme}://{host}{slash}{path}" if rest else scheme)


def check_url(url: str, what: str, example: str) -> None:
    """Raise LedgerError unless ``url`` is an HTTP URL; ``what`` it should be of, and an ``example``."""
    _split(url, what, example)


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to the same host and port, and no other."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise urllib.error.HTTPError(req.full_url, code, "a redirect to another host", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(
    url: str,
    seconds: float = TIMEOUT_SECONDS,
    *,
    data: bytes | None = None,
    headers: Mapping[str, str] = NOTHING,
    most: int = MOST_BYTES,
) -> str:
    """The text at a URL, of ``most`` bytes, within some seconds; ``data`` is posted there.

    Raises OSError or ValueError without a password in its text; an answer with an error status is an
    ``HTTPError``.
    """
    found = _split(url)
    user, _, host = found.netloc.rpartition("@")
    request = urllib.request.Request(
        urlunsplit(found._replace(netloc=host, fragment="")), data, dict(headers)
    )
    if user:
        request.add_header("Authorization", "Basic " + base64.b64encode(unquote(user).encode()).decode())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameHost())
    ends, answer = time.monotonic() + seconds, bytearray()
    try:
        with direct.open(request, timeout=seconds) as response:
            while some := response.read1(_READ_BYTES):
                answer += some
                if len(answer) > most:
                    raise ValueError(f"more than {most:,} bytes")
                if time.monotonic() > ends:
                    raise TimeoutError("timed out")
    except http.client.HTTPException as error:
        raise ValueError(f"no answer of HTTP ({type(error).__name__})") from None
    return answer.decode()
