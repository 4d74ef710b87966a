"""The one HTTP client, against servers that answer in their own way."""

from __future__ import annotations

import ast
import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.exporters import http_client
from kvledger.exporters.http_client import check_url, fetch, shown

Handler = BaseHTTPRequestHandler
FOLDERS = ("audit", "exporters", "dashboards")


@contextmanager
def serving(answer: Callable[[Handler], None]) -> Iterator[str]:
    """The address of a server that answers like this."""

    class Served(Handler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def redirect(to: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        if handler.path == "/there":
            return text(b"here")(handler)
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.end_headers()

    return answer


def text(body: bytes) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_redirect_to_another_host_is_not_followed() -> None:
    asked: list[str] = []
    with serving(lambda handler: asked.append(handler.path)) as other:
        for to in (
            f"http://{other}/metrics",
            f"https://{other}/",
            "ftp://localhost/x",
            "file:///etc/hostname",
        ):
            with serving(redirect(to)) as place, pytest.raises((HTTPError, OSError)):
                fetch(f"http://{place}/metrics")
    assert [] == asked


def test_a_redirect_on_the_same_host_is_followed() -> None:
    with serving(redirect("/there")) as place:
        assert "here" == fetch(f"http://{place}/metrics")


def test_an_answer_that_is_too_large_or_does_not_end_is_cut_off() -> None:
    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.05)

    with serving(text(b"#" * 100)) as place:
        assert 100 == len(fetch(f"http://{place}", most=100))
        with pytest.raises(ValueError, match="more than 99 bytes"):
            fetch(f"http://{place}", most=99)
    with serving(endless) as place:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            fetch(f"http://{place}", 0.3)
        assert time.monotonic() - began < 2


def test_a_password_is_sent_and_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[str | None] = []

    def refuses(handler: Handler) -> None:
        sent.append(handler.headers["Authorization"])
        handler.send_response(403)
        handler.end_headers()

    with serving(refuses) as place:
        url = f"http://user:c%40nary@{place}/metrics?token=c@nary"
        with pytest.raises(HTTPError) as refused:
            fetch(url)
    assert ["Basic " + base64.b64encode(b"user:c@nary").decode()] == sent
    for printed in (str(refused.value), repr(refused.value), shown(url), *capsys.readouterr()):
        assert "nary" not in printed
    assert f"http://{place}/metrics" == shown(url)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://u:canary@host/",
        "http://",
        "",
        "http://u:canary@host:port/",
        "http://u:canary@:0/",
    ],
)
def test_what_is_no_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(LedgerError, match="is no URL of a server; an example is http://x") as refused:
        check_url(url, "a server", "http://x")
    assert "canary" not in str(refused.value)


def test_one_module_asks_over_http() -> None:
    """Others are what answers: a server, and the session of the SDK's own exporter, which reads no answer."""
    root = Path(http_client.__file__).parents[1]
    clients = {"urllib.request", "requests", "httpx", "aiohttp", "urllib3"}
    found = set()
    for path in chain.from_iterable((root / folder).rglob("*.py") for folder in FOLDERS):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if clients.intersection(names):
                found.add(path.name)
    assert {"http_client.py", "otlp_session.py"} == found
