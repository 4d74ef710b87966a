"""--web.config.file: TLS and users in the format of Prometheus's exporter-toolkit."""

from __future__ import annotations

import base64
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from tests import journals
from tests.exporters.sidecar.test_http_server import everything, served

from kvledger.audit.errors import LedgerError
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
