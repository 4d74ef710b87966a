"""``--web.config.file``: TLS and users, in the format of Prometheus's exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md defines the keys. A key
that kvledger does not support is an error and never ignored, because an ignored key may leave access open.
The file is read once. Needs the web extra.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from ...audit.errors import LedgerError
from ...audit.foreign import text_of
from .http_server import Security

_FIELD_VALUE = re.compile(r"[!-~]([\t -~]*[!-~])?")
"""A header's value: visible ASCII, with blanks inside. https://www.rfc-editor.org/rfc/rfc9110#section-5.5"""

_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

Version = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
Client = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]


class TlsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``tls_server_config``. Paths are relative to the folder of the configuration file."""

    cert_file: str
    key_file: str
    client_auth_type: Client = "NoClientCert"
    client_ca_file: str = ""
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"


Headers = msgspec.defstruct(
    "Headers",
    [
        (name.lower().replace("-", "_"), str, msgspec.field(default="", name=name))
        for name in (
            "Content-Security-Policy",
            "Strict-Transport-Security",
            "X-Content-Type-Options",
            "X-Frame-Options",
            "X-XSS-Protection",
        )
    ],
    forbid_unknown_fields=True,
)
"""The headers that may be set, as in the toolkit."""


class HttpConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``http_server_config``. HTTP/2 is not supported, so ``http2: true`` is an error."""

    http2: Literal[False] = False
    headers: Headers = msgspec.field(default_factory=Headers)  # type: ignore[valid-type]


class WebConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsConfig | None = None
    http_server_config: HttpConfig = msgspec.field(default_factory=HttpConfig)
    basic_auth_users: dict[str, str] = {}


MOST_BYTES = 1 << 20


def load(path: Path) -> Security:
    """Read the file. Raises :class:`LedgerError` for anything wrong in it."""
    text = text_of(path, MOST_BYTES)
    try:
        config = msgspec.convert(yaml.safe_load(text) or {}, WebConfig)
    except RecursionError:
        raise LedgerError(f"{path} is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise LedgerError(f"{path} is not as it should be: {error}.") from None
    except (yaml.YAMLError, ValueError) as error:  # a date or a number that is none is a ValueError
        raise LedgerError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    authorizes = None
    if config.basic_auth_users:
        from .web_users import Users

        authorizes = Users(config.basic_auth_users)
    tls = _context(config.tls_server_config, path) if config.tls_server_config else None
    headers = {
        field.encode_name: value
        for field in msgspec.structs.fields(Headers)
        if (value := getattr(config.http_server_config.headers, field.name))
    }
    for name, value in headers.items():
        if not _FIELD_VALUE.fullmatch(value):
            raise LedgerError(
                f"{path}: {name} has a line break or another character that no header may have."
            )
    return Security(tls, authorizes, headers)


def _context(config: TlsConfig, path: Path) -> ssl.SSLContext:
    verifies = config.client_auth_type != "NoClientCert"
    if verifies != bool(config.client_ca_file):
        needs = "needs" if verifies else "needs no"
        raise LedgerError(f"{path}: client_auth_type {config.client_auth_type} {needs} client_ca_file.")
    if _VERSIONS[config.min_version] > _VERSIONS[config.max_version]:
        raise LedgerError(
            f"{path}: min_version {config.min_version} is above max_version {config.max_version}."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    try:
        context.load_cert_chain(path.parent / config.cert_file, path.parent / config.key_file)
        if verifies:
            context.load_verify_locations(path.parent / config.client_ca_file)
            context.verify_mode = _CLIENTS[config.client_auth_type]
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise LedgerError(f"{path}: the certificate, its key or the CA can't be used: {reason}.") from None
    return context
