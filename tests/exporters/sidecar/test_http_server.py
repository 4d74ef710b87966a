"""The sidecar's pages, and its limits for slow, huge and malformed requests."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text_format
from tests import journals
from tests.histories import events

from kvledger.audit.checks.registry import catalogue
from kvledger.audit.errors import LedgerError
from kvledger.exporters.sidecar import http_server, pages
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.pages import Site

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Answer:
    """One HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def text(self) -> str:
        return self.body.decode()


class Client:
    """Asks one server."""

    def __init__(self, server: http_server.Server, follower: Follower) -> None:
        self.server = server
        self.follower = follower
        self.address: tuple[str, int] = ("127.0.0.1", server.server_port)

    def get(self, path: str, method: str = "GET", source: str = "127.0.0.1", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=30, source_address=(source, 0))
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = Answer(connection.getresponse())
        connection.close()
        return answer

    def connect(self, data: bytes = b"") -> socket.socket:
        opened = socket.create_connection(self.address, timeout=30)
        opened.sendall(data)
        return opened


@contextlib.contextmanager
def served(
    path: Path, *, ready: bool = True, security: http_server.Security = http_server.OPEN
) -> Iterator[Client]:
    follower = Follower(path)
    if ready:
        follower.catch_up()
    server = http_server.listen("127.0.0.1:0", Site(follower, security), security)
    try:
        yield Client(server, follower)
    finally:
        server.shutdown()
        server.server_close()
        follower.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    journals.violated(tmp_path / "engine")
    with served(tmp_path) as client:
        yield client


def everything(answer: socket.socket) -> bytes:
    """Everything that is received until the other side closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := answer.recv(65536):
            data += more
    return data


# --- pages ------------------------------------------------------------------------------------------------


def test_metrics_as_prometheus_text(client: Client) -> None:
    answer = client.get("/metrics")

    assert 200 == answer.status
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    names = {family.name for family in text_format(answer.text)}
    assert "kvledger_prompt_tokens" in names
    assert not [name for name in names if name.endswith("_created")]


def test_openmetrics_have_created_times(client: Client) -> None:
    """The created time is the engine's start, which a restart of the sidecar does not change."""
    answer = client.get("/metrics", Accept=OPENMETRICS)

    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    created = {
        sample.name: sample.value
        for family in openmetrics(answer.text)
        for sample in family.samples
        if sample.name.endswith("_created")
    }
    assert 1.7e9 == created["kvledger_prompt_tokens_created"]
    assert {1.7e9} == set(created.values())


def test_metrics_compressed(client: Client) -> None:
    answer = client.get("/metrics", Accept_Encoding="gzip")

    assert "gzip" == answer.headers["Content-Encoding"]
    assert b"kvledger_requests_total" in gzip.decompress(answer.body)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("image/png", "text/plain; version=0.0.4"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
        ("APPLICATION/openmetrics-text ; Version = 1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text; version=0.0.1", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=abc", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=", "text/plain; version=0.0.4"),
        ("text/plain; version=abc", "text/plain; version=0.0.4"),
        ("text/plain; version=\u0661.0.0".encode().decode("latin-1"), "text/plain; version=0.0.4"),
        ("application/openmetrics-text;q=0", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;q=0, */*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;q=0.5, text/plain", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;q=often", "text/plain; version=0.0.4"),
        ("text/plain;q=0, */*;q=0.1", "application/openmetrics-text; version=1.0.0"),
        (";;;=,,q=1;", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2",
            "application/openmetrics-text; version=1.0.0",
        ),
    ],
)
def test_the_format_that_a_scraper_likes_best(client: Client, accept: str, format: str) -> None:
    """By RFC 9110; a header that can't be understood gets the text format."""
    answer = client.get("/metrics", Accept=accept)

    assert 200 == answer.status
    assert answer.headers["Content-Type"].startswith(format)
    assert "kvledger_requests_total" in answer.text


@pytest.mark.parametrize("accept", ["gzip;q=0", "gzip;q=0.0, identity", "identity", "gzip;q=x"])
def test_compression_that_was_not_asked_for(client: Client, accept: str) -> None:
    answer = client.get("/metrics", Accept_Encoding=accept)

    assert answer.headers["Content-Encoding"] is None
    assert "kvledger_requests_total" in answer.text


def test_the_server_names_no_version(client: Client) -> None:
    """Of kvledger, Python or the standard library's server; also if the request is malformed."""
    for path in ("/", "/metrics", "/nothing"):
        assert ["kvledger"] == client.get(path).headers.get_all("Server")
    with client.connect(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200) as bad:
        assert b"Server: kvledger\r\n" in everything(bad)


def test_head_answers_with_the_headers_of_get(client: Client) -> None:
    steady = "/metrics?name[]=kvledger_engine_observed"  # no figure that changes from scrape to scrape
    for path in ("/", steady, "/findings", "/nothing"):
        asked, headed = client.get(path), client.get(path, "HEAD")
        assert b"" == headed.body
        for name in ("Content-Type", "Content-Length"):
            assert asked.headers[name] == headed.headers[name]
        assert len(asked.body) == int(headed.headers["Content-Length"])


def test_findings_are_json(client: Client) -> None:
    page = json.loads(client.get("/findings").body)

    finding = next(one for one in page["findings"] if one["severity"] == "violation")
    assert ("tokens/negative", "violation") == (finding["id"], finding["severity"])
    assert 1.7e9 <= finding["time"] < 1.7e9 + 60
    assert 0 == page["left_out"]


def test_findings_are_bounded_and_the_newest_are_last(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pages, "FINDINGS_SHOWN", 2)
    stream = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    for number in range(4):
        journals.write(tmp_path / f"engine-{number}", stream, configuration={"model": f"{number}"})
    with served(tmp_path) as client:
        for number, engine_audit in enumerate(client.follower.audits):
            started = replace(journals.STARTED, wall_seconds=1e9 + (number * 7) % 4)
            engine_audit.auditor.ledger.engine = started
            engine_audit.auditor.ledger.clock = started.began_seconds
        page = json.loads(client.get("/findings").body)

    assert page["left_out"] > 2
    assert sorted(one["time"] for one in page["findings"]) == [one["time"] for one in page["findings"]]
    assert 1e9 + 3 <= page["findings"][0]["time"]


def test_the_landing_page_lists_engines_and_links(client: Client) -> None:
    page = client.get("/")

    assert page.headers["Content-Type"].startswith("text/html")
    for word in ("vllm 0.32.0 pid 4000", "violated", 'href="/metrics"', 'href="/findings"'):
        assert word in page.text


def test_every_invariant_is_explained(client: Client) -> None:
    page = client.get("/explain/")
    assert page.text == client.get("/explain").text

    for id in catalogue():
        assert f'href="/explain/{id}"' in page.text
        assert 200 == client.get(f"/explain/{id}").status
    assert 404 == client.get("/explain/tokens/nothing").status


def test_engine_names_are_escaped(tmp_path: Path) -> None:
    journals.write(tmp_path / "engine", [], version="<script>")
    with served(tmp_path) as client:
        assert "<script>" not in client.get("/").text


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        assert "No engine has written a journal yet." in client.get("/").text
        assert 200 == client.get("/metrics").status


def test_the_landing_page_counts_folded_journals(tmp_path: Path) -> None:
    """Where every engine ended long ago, the page does not say that there was none."""
    for number in range(3):
        journals.clean(tmp_path / f"engine-{number}")
    with served(tmp_path) as client:
        page = client.get("/").text
        assert "ended engines that are not listed by themselves: 2." in page
        assert "No engine has written" not in page


def test_pages_with_figures_are_503_before_catching_up(tmp_path: Path) -> None:
    journals.clean(tmp_path / "engine")
    with served(tmp_path, ready=False) as client:
        for path in ("/metrics", "/-/ready", "/findings"):
            assert 503 == client.get(path).status
        assert 200 == client.get("/-/healthy").status
        assert "not ready yet" in client.get("/").text
        client.follower.catch_up()
        for path in ("/metrics", "/-/ready", "/findings"):
            assert 200 == client.get(path).status


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/../etc/passwd", "/-/", "/%2e%2e/x"])
def test_other_paths_are_not_found(client: Client, path: str) -> None:
    assert 404 == client.get(path).status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "NONSENSE"])
def test_other_methods_are_refused(client: Client, method: str) -> None:
    answer = client.get("/metrics", method)

    assert (405, "GET, HEAD") == (answer.status, answer.headers["Allow"])


def test_an_exception_in_kvledger_is_a_500_and_one_sentence(tmp_path: Path, capfd: Any) -> None:
    journals.clean(tmp_path / "engine")
    follower = Follower(tmp_path)
    follower.catch_up()
    notified: list[str] = []
    pages = Site(follower, notify=notified.append)
    follower.journals["engine"].engine_audit.auditor = None  # type: ignore[assignment]
    status: list[str] = []
    for path in ("/metrics", "/findings", "/"):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path}
        assert b"kvledger itself failed.\n" == b"".join(
            pages(environ, lambda line, headers, *_: status.append(line))
        )
    assert ["500 Internal Server Error"] * 3 == status
    assert 3 == len(notified)
    assert ("", "") == capfd.readouterr()


# --- whoever is slow, huge or malformed ---------------------------------------------------------------------


def test_slow_clients_do_not_delay_a_scrape(client: Client) -> None:
    """Three times as many clients as there is room for, each sending one letter."""
    idle = [client.connect(b"G") for _ in range(3 * http_server.CONNECTIONS)]
    for _ in range(5):
        assert 200 == client.get("/metrics").status
    for one in idle:
        one.close()


def test_a_scrape_waits_for_the_threads_of_closed_connections(monkeypatch: Any) -> None:
    """A flood closed them for each other, and their threads have not ended yet."""
    monkeypatch.setattr(http_server, "CONNECTIONS", 1)
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.0)
    asked, end = threading.Semaphore(0), threading.Event()

    def site(environ: http_server.Environ, start: http_server.Start) -> Iterator[bytes]:
        if environ["PATH_INFO"] == "/slow":
            asked.release()
            end.wait(30)
        start("200 OK", [])
        return iter([b"answered"])

    server = http_server.listen("127.0.0.1:0", site)
    slow = []
    for _ in range(2):
        slow.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=30))
        slow[-1].sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        assert asked.acquire(timeout=30)
    threading.Timer(0.2, end.set).start()
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        assert b"answered" == answer.read()
    for one in slow:
        one.close()
    server.shutdown()
    server.server_close()


def test_a_slow_client_is_cut_off(client: Client, monkeypatch: Any) -> None:
    """Even if it keeps sending single letters."""
    monkeypatch.setattr(http_server, "DEADLINE_SECONDS", 0.5)
    with client.connect(b"GET /metrics HTTP/1.1\r\n") as slow:
        drip = threading.Event()

        def dripping() -> None:
            with contextlib.suppress(OSError):
                while not drip.wait(0.1):
                    slow.sendall(b"X-Slow: 1\r\n")

        thread = threading.Thread(target=dripping)
        thread.start()
        assert b"200" not in everything(slow)
        drip.set()
        thread.join()


def test_clients_that_do_not_read_do_not_delay_a_scrape(monkeypatch: Any, capfd: Any) -> None:
    """The answer is larger than any buffer and no client reads it: the oldest are closed."""
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.1)

    def large(environ: http_server.Environ, start: http_server.Start) -> Iterator[bytes]:
        start("200 OK", [])
        return iter([b"x" * (64 << 20)] if environ["PATH_INFO"] == "/large" else [b"small"])

    server = http_server.listen("127.0.0.1:0", large)
    address = ("127.0.0.1", server.server_port)
    deaf = [socket.create_connection(address, timeout=30) for _ in range(http_server.CONNECTIONS)]
    for one in deaf:
        one.sendall(b"GET /large HTTP/1.1\r\n\r\n")
    for one in deaf:
        assert one.recv(1)
    time.sleep(0.1)
    for _ in range(3):
        with urllib.request.urlopen(f"{server.url}/small", timeout=30) as answer:
            assert b"small" == answer.read()
    for one in deaf:
        one.close()
    server.shutdown()
    server.server_close()
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (n, b"a" * 500) for n in range(90)), b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200, b"431"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n", b"400"),
        (b"GET / / / HTTP/1.1\r\n\r\n", b"400"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 1000, b"405"),
    ],
    ids=["path", "header", "headers", "many headers", "version", "words", "TLS", "blanks", "body"],
)
def test_huge_and_malformed_requests_are_refused(
    client: Client, request_bytes: bytes, status: bytes, capfd: Any
) -> None:
    with contextlib.suppress(ConnectionError), client.connect() as bad:
        with contextlib.suppress(ConnectionError):
            bad.sendall(request_bytes)
        answer = everything(bad)
        assert not answer or status in answer[:300]
    assert 200 == client.get("/-/healthy").status
    assert "Traceback" not in capfd.readouterr().err


def test_malformed_input_is_not_logged(client: Client, capfd: Any) -> None:
    for noise in (b"", b"\0" * 1000, b"\r\n" * 50, bytes(range(256)) * 20):
        with client.connect(noise) as one:
            one.shutdown(socket.SHUT_WR)
            everything(one)
    assert 200 == client.get("/metrics").status
    assert ("", "") == capfd.readouterr()


def test_a_bare_request_line_is_answered(client: Client) -> None:
    """The standard library reads it as HTTP/0.9, which is harmless."""
    with client.connect(b"GET /-/healthy\r\n\r\n") as old:
        assert b"Healthy" in everything(old)


# --- where it listens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["9464", "localhost:", "localhost:http", "localhost:70000", "a:\u0663"])
def test_a_malformed_listen_address_is_an_error(address: str) -> None:
    with pytest.raises(LedgerError, match="is no listen address"):
        http_server.parse_address(address)


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        (":9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_a_listen_address(address: str, parsed: tuple[str, int]) -> None:
    assert parsed == http_server.parse_address(address)


def test_an_address_in_use_is_an_error(client: Client) -> None:
    with pytest.raises(LedgerError, match=r"Can't listen on 127\.0\.0\.1:\d+: Address already in use\."):
        http_server.listen(f"127.0.0.1:{client.server.server_port}", Site(client.follower))


def test_an_unknown_host_is_an_error(client: Client) -> None:
    with pytest.raises(LedgerError, match=r"Can't listen on no\.such\.host\.invalid:0"):
        http_server.listen("no.such.host.invalid:0", Site(client.follower))


def test_the_url_has_the_chosen_port(client: Client) -> None:
    with urllib.request.urlopen(f"{client.server.url}/-/healthy", timeout=30) as answer:
        assert b"Healthy.\n" == answer.read()
