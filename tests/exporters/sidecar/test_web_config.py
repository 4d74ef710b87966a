"""--web.config.file: TLS and users in the format of Prometheus's exporter-toolkit."""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from tests import journals
from tests.exporters.sidecar.test_http_server import everything, served

from kvledger.audit.errors import LedgerError
from kvledger.exporters.sidecar import web_users
from kvledger.exporters.sidecar.http_server import Busy
from kvledger.exporters.sidecar.web_config import load
from kvledger.exporters.sidecar.web_users import Users

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def written(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA with a server certificate and a client certificate."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", "2")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        words = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *words)
    return folder


def client_context(certificates: Path, *, with_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    if with_certificate:
        context.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    return context


# --- users ------------------------------------------------------------------------------------------------


def test_every_page_needs_the_password(tmp_path: Path) -> None:
    journals.clean(tmp_path / "engine")
    security = load(written(tmp_path, f"basic_auth_users:\n  prometheus: {HASH}\n"))
    with served(tmp_path, security=security) as client:
        for path in ("/metrics", "/", "/findings", "/-/healthy", "/nothing"):
            refused = client.get(path)
            assert (401, 'Basic realm="kvledger"') == (refused.status, refused.headers["WWW-Authenticate"])
        assert 401 == client.get("/metrics", Authorization=basic("prometheus", "Secret")).status
        assert 200 == client.get("/metrics", Authorization=basic("prometheus", "secret")).status


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic",
        "Basic !!!",
        "Bearer x",
        "Basic \u0663",
        basic("prometheus", ""),
        basic("nobody", "secret"),
        basic("", ""),
        basic("prometheus", "secret\0"),
        basic("prometheus", "s" * 200),
        "Basic " + base64.b64encode(b"prometheus").decode(),
        "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),
    ],
)
def test_wrong_credentials_are_refused(header: str) -> None:
    assert not Users({"prometheus": HASH})(header)


def test_a_correct_password_is_hashed_once(monkeypatch: Any) -> None:
    users = Users({"prometheus": HASH})
    assert users(basic("prometheus", "secret"))
    monkeypatch.setattr(bcrypt, "checkpw", None)

    assert users(basic("prometheus", "secret"))


def test_wrong_passwords_do_not_hold_up_honest_scrapes(tmp_path: Path) -> None:
    """Fifteen a second of a cost that allows four, from one client; the scraper asks as usual."""
    journals.clean(tmp_path / "engine")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(12)).decode()
    security = load(written(tmp_path, f"basic_auth_users:\n  prometheus: {hashed}\n"))
    stop, refused = threading.Event(), []

    with served(tmp_path, security=security) as client:
        honest = {"Authorization": basic("prometheus", "secret")}
        assert 200 == client.get("/metrics", **honest).status

        def guess(number: int) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                header = basic("prometheus", f"wrong-{number}")
                refused.append(client.get("/metrics", Authorization=header).status)

        def flood() -> None:
            number = 0
            while not stop.wait(1 / 15):
                threading.Thread(target=guess, args=(number := number + 1,), daemon=True).start()

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            time.sleep(3)
            taken = []
            for _ in range(10):
                began = time.monotonic()
                assert 200 == client.get("/metrics", **honest).status
                taken.append(time.monotonic() - began)
                time.sleep(0.2)
        finally:
            stop.set()
            flooding.join()
    assert max(taken) < 2
    assert {401, 429} == set(refused)


def test_a_client_that_guesses_does_not_keep_another_from_its_first_check(monkeypatch: Any) -> None:
    """Each address has two places in the queue, so that one is left for others."""
    users = Users({"prometheus": HASH})
    open_, entered = threading.Event(), threading.Event()

    def slow(password: bytes, hashed: bytes) -> bool:
        entered.set()
        return open_.wait(30) and password == b"secret"

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    threads = [
        threading.Thread(target=users, args=(basic("prometheus", f"wrong-{number}"), "guesser"))
        for number in range(web_users.WAITERS_OF_A_CLIENT)
    ]
    for thread in threads:
        thread.start()
    entered.wait(30)
    wait_until(lambda: len(users._queue._waiters) == len(threads))

    with pytest.raises(Busy):
        users(basic("prometheus", "another"), "guesser")
    answers: list[bool] = []
    honest = threading.Thread(target=lambda: answers.append(users(basic("prometheus", "secret"), "scraper")))
    honest.start()
    wait_until(lambda: len(users._queue._waiters) == len(threads) + 1)
    open_.set()
    for thread in (*threads, honest):
        thread.join(30)
    assert [True] == answers
    assert [] == users._queue._waiters


def test_the_queue_is_bounded_and_a_waiter_gives_up_when_it_is_cut_off(monkeypatch: Any) -> None:
    users = Users({"prometheus": HASH})
    open_, cut = threading.Event(), threading.Event()
    monkeypatch.setattr(bcrypt, "checkpw", lambda *_: open_.wait(30))
    outcomes: list[str] = []

    def ask(number: int) -> None:
        try:
            users(basic("prometheus", f"wrong-{number}"), f"client-{number}", cut.is_set)
            outcomes.append("checked")
        except Busy:
            outcomes.append("busy")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(web_users.WAITERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(users._queue._waiters) == web_users.WAITERS)
    with pytest.raises(Busy):
        users(basic("prometheus", "more"), "another client")
    cut.set()
    wait_until(lambda: len(outcomes) == web_users.WAITERS - 1)
    assert {"busy"} == set(outcomes)
    open_.set()
    for thread in threads:
        thread.join(30)
    assert [] == users._queue._waiters


def test_the_first_honest_password_after_a_restart_is_checked_next(monkeypatch: Any) -> None:
    """Eight addresses guess without end, and each has failed before; the queue is full of them."""
    users = Users({"prometheus": HASH})
    stop, checked = threading.Event(), []

    def slow(password: bytes, hashed: bytes) -> bool:
        time.sleep(0.02)
        checked.append(password)
        return password == b"secret"

    def guess(client: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(Busy):
                users(basic("prometheus", f"wrong-{client}-{number}"), f"client-{client % 8}")

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    threads = [threading.Thread(target=guess, args=(client,)) for client in range(16)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(checked) > 24 and len(users._queue._waiters) == web_users.WAITERS)
        before = len(checked)
        assert users(basic("prometheus", "secret"), "scraper")
        between = checked[before:].index(b"secret")
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert between <= 1


def test_a_scrape_gets_in_within_a_second_while_others_guess(tmp_path: Path) -> None:
    """A new sidecar remembers no password. The guesses come from an address that failed before."""
    journals.clean(tmp_path / "engine")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(11)).decode()
    security = load(written(tmp_path, f"basic_auth_users:\n  prometheus: {hashed}\n"))
    stop, refused = threading.Event(), []

    with served(tmp_path, security=security) as client:

        def guess(number: int) -> None:
            while not stop.is_set():
                number += 16
                header = basic("prometheus", f"wrong-{number}")
                with contextlib.suppress(OSError, http.client.HTTPException):
                    refused.append(client.get("/metrics", source="127.0.0.9", Authorization=header).status)

        threads = [threading.Thread(target=guess, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: 401 in refused and 429 in refused)
            began = time.monotonic()
            honest = client.get("/metrics", Authorization=basic("prometheus", "secret"))
            taken = time.monotonic() - began
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    assert 200 == honest.status
    assert taken < 1


def test_a_wrong_password_is_hashed_once(monkeypatch: Any) -> None:
    """A scraper with an old password does not keep others from their turn."""
    users = Users({"prometheus": HASH})
    assert not users(basic("prometheus", "old"))
    monkeypatch.setattr(bcrypt, "checkpw", None)

    assert not users(basic("prometheus", "old"))


def test_few_passwords_and_addresses_are_remembered(monkeypatch: Any) -> None:
    users = Users({"prometheus": HASH})
    monkeypatch.setattr(bcrypt, "checkpw", lambda *_: False)
    for number in range(5_000):
        assert not users(basic("prometheus", str(number)), str(number))

    for most, kept in (web_users._REMEMBERED, users._wrong), (web_users._FAILED, users._failed):
        assert most <= len(kept._values) <= most + most // 8


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("user", ["cheap", "dear", "nobody"])
def test_a_wrong_password_costs_the_same_for_every_user(user: str, monkeypatch: Any) -> None:
    """As much as the most expensive hash; else the time would tell which users exist."""
    hashes = {
        "cheap": bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode(),
        "dear": bcrypt.hashpw(b"secret", bcrypt.gensalt(7)).decode(),
    }
    users = Users(hashes)
    spent: list[int] = []
    checkpw = bcrypt.checkpw

    def counted(password: bytes, hashed: bytes) -> bool:
        spent.append(2 ** int(hashed[4:6]))
        return checkpw(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    assert not users(basic(user, "wrong"))
    assert 2**7 == sum(spent)
    if user != "nobody":
        assert users(basic(user, "secret"))


# --- TLS --------------------------------------------------------------------------------------------------


def test_tls(tmp_path: Path, certificates: Path) -> None:
    text = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
    security = load(written(certificates, text))
    journals.clean(tmp_path / "engine")
    with served(tmp_path, security=security) as client:
        assert client.server.url.startswith("https://")
        url = f"{client.server.url}/metrics"
        with urllib.request.urlopen(url, timeout=30, context=client_context(certificates)) as answer:
            assert b"kvledger_requests_total" in answer.read()
        with client.connect(b"GET /metrics HTTP/1.1\r\n\r\n") as plain:
            assert b"kvledger" not in everything(plain)


def test_an_endless_handshake_does_not_delay_a_scrape(tmp_path: Path, certificates: Path) -> None:
    text = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"
    security = load(written(certificates, text))
    with served(tmp_path, security=security) as client:
        idle = [client.connect() for _ in range(40)]
        context = client_context(certificates)
        with urllib.request.urlopen(f"{client.server.url}/-/healthy", timeout=30, context=context) as answer:
            assert 200 == answer.status
        for one in idle:
            one.close()


def test_an_old_tls_is_refused(tmp_path: Path, certificates: Path) -> None:
    text = "tls_server_config: {cert_file: server.crt, key_file: server.key, min_version: TLS13}\n"
    security = load(written(certificates, text))
    context = client_context(certificates)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with served(tmp_path, security=security) as client, pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{client.server.url}/-/healthy", timeout=30, context=context)


def test_a_client_without_a_certificate_is_refused(tmp_path: Path, certificates: Path) -> None:
    text = (
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"
    )
    security = load(written(certificates, text))
    with served(tmp_path, security=security) as client:
        url = f"{client.server.url}/-/healthy"
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(url, timeout=30, context=client_context(certificates))
        context = client_context(certificates, with_certificate=True)
        with urllib.request.urlopen(url, timeout=30, context=context) as answer:
            assert 200 == answer.status


# --- the file ---------------------------------------------------------------------------------------------


def test_headers(tmp_path: Path) -> None:
    text = "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
    with served(tmp_path, security=load(written(tmp_path, text))) as client:
        for path in ("/", "/metrics", "/nothing"):
            assert "deny" == client.get(path).headers["X-Frame-Options"]


def test_an_empty_file_configures_nothing(tmp_path: Path) -> None:
    security = load(written(tmp_path, "# nothing yet\n"))

    assert (None, None, {}) == (security.tls, security.authorizes, security.headers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tls_server_config: {cert_file: a}", "missing required field `key_file`"),
        ("tls_server_config: {cert_file: a, key_file: b}", "can't be used: No such file or directory"),
        ("tls_server_config: {cert_file: web.yml, key_file: web.yml}", "can't be used: "),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS14}", "Invalid enum value 'TLS14'"),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "Invalid enum value 'RequireAnyClientCert'",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "needs client_ca_file",
        ),
        ("tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}", "needs no client_ca_file"),
        ("tls_config: {}", "unknown field `tls_config`"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "min_version TLS13 is above max_version TLS12",
        ),
        (
            'http_server_config: {headers: {X-Frame-Options: "deny\\r\\nSet-Cookie: a=b"}}',
            "X-Frame-Options has a line break or another character",
        ),
        ('http_server_config: {headers: {X-Frame-Options: "d\\0"}}', "X-Frame-Options has a line break or"),
        (
            "http_server_config: {headers: {X-Frame-Options: d\u00e9ni}}",
            "X-Frame-Options has a line break or",
        ),
        ("http_server_config: {http2: true}", "http_server_config.http2"),
        ("http_server_config: {headers: {Server: x}}", "unknown field `Server`"),
        ("basic_auth_users: {a: secret}", "The password of user 'a' is no bcrypt hash"),
        ("basic_auth_users: {a: 7}", "Expected `str`, got `int`"),
        ("basic_auth_users: [a", "is no YAML"),
        ("- a", "Expected `object`, got `array`"),
        ("!!python/object/apply:os.system [echo]", "is no YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(LedgerError) as raised:
        load(written(tmp_path, text))

    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"web\.yml can't be read: No such file or directory\."):
        load(tmp_path / "web.yml")


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(LedgerError, match=r"web\.yml can't be read: not UTF-8\."):
        load(tmp_path / "web.yml")
