"""The options of ``kvledger serve``: their variables, the log, the check, systemd, and how soon it ends."""

from __future__ import annotations

import io
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from tests import journals
from tests.command_line import exit_code, runner
from tests.exporters.sidecar.test_http_server import Client, served
from tests.time_limits import HANGS

from kvledger import cli
from kvledger.audit.entry.variables import SIDECAR
from kvledger.audit.journal.catalogue import say
from kvledger.exporters.sidecar import http_server, serve
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.pages import Site
from kvledger.exporters.sidecar.serve import FORMATS, LEVELS, Log


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return runner(capsys, "serve")


# --- the log --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("text", r'A journal says "no"\.'),
        ("logfmt", r'time=\S+Z level=WARN msg="A journal says \\"no\\"\."'),
        ("json", r'{"time": "\S+Z", "level": "WARN", "msg": "A journal says \\"no\\"\."}'),
    ],
)
def test_a_log_line_has_the_chosen_form(format: str, expected: str) -> None:
    out = io.StringIO()
    Log("info", format, out)('A journal says "no".')

    assert re.fullmatch(f"{expected}\n", out.getvalue())
    if format == "json":
        assert 'A journal says "no".' == json.loads(out.getvalue())["msg"]


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("info", 2), ("warn", 1), ("error", 0)])
def test_less_severe_lines_are_left_out(level: str, lines: int) -> None:
    out = io.StringIO()
    log = Log(level, stream=out)
    log.info("Serving.")
    log("A problem.")

    assert lines == len(out.getvalue().splitlines())


def test_a_control_character_from_a_journal_is_not_printed() -> None:
    out = io.StringIO()
    Log("info", "logfmt", out)("engine \x1b[31m")

    assert "\x1b" not in out.getvalue()


# --- options and their variables --------------------------------------------------------------------------


def test_every_option_of_serve_has_a_variable_of_its_name() -> None:
    command: Any = typer.main.get_command(cli.app)
    options = command.commands["serve"].params
    by_variable = {each.envvar: each.opts[0] for each in options if each.envvar}
    no_setting = {"--check-config", "--help"}

    assert {"KVLEDGER_DIR", *SIDECAR} == set(by_variable)
    assert no_setting >= {each.opts[0] for each in options if not each.envvar}
    for variable, option in by_variable.items():
        if option.startswith("--"):
            assert variable == "KVLEDGER_" + re.sub(r"[.-]", "_", option[2:]).upper()


def test_a_variable_takes_the_place_of_an_option(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    monkeypatch.setenv("KVLEDGER_WEB_LISTEN_ADDRESS", "here")
    assert (2, "", "'here' is no listen address; an example is 127.0.0.1:9464.\n") == run("--check-config")

    assert 0 == run("--check-config", "--web.listen-address", ":0")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--log.level", "loud"), "'loud' is none of debug, info, warn and error."),
        (("--log.format", "xml"), "'xml' is none of text, logfmt and json."),
        (("--web.telemetry-path", "metrics"), "'metrics' is no path of an address"),
        (("--engine-url", "here"), "'here' is no URL of an engine's metrics"),
        (("--web.config.file", "nowhere.yml"), "nowhere.yml"),
        (("--state", "/dev/null/state"), "/dev/null/state can't be written."),
    ],
)
def test_check_config_names_what_is_wrong(
    words: tuple[str, ...], sentence: str, run: Any, tmp_path: Path
) -> None:
    code, out, err = run(tmp_path, "--check-config", *words)

    assert (2, "") == (code, out)
    assert sentence in err


def test_check_config_writes_nothing_and_listens_nowhere(run: Any, tmp_path: Path) -> None:
    journals.clean(tmp_path / "one")
    before = sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = run(tmp_path, "--check-config", "--web.listen-address", address)

    assert (0, "The configuration is valid.\n", "") == outcome
    assert before == sorted(tmp_path.rglob("*"))


def test_the_choices_of_the_options_are_those_of_the_log() -> None:
    command: Any = typer.main.get_command(cli.app)
    metavars = {each.opts[0]: each.metavar for each in command.commands["serve"].params}

    assert "|".join(LEVELS) == metavars["--log.level"]
    assert "|".join(FORMATS) == metavars["--log.format"]


# --- pages ------------------------------------------------------------------------------------------------


def test_the_sidecars_own_process_is_among_the_metrics(tmp_path: Path) -> None:
    journals.clean(tmp_path / "one")
    with served(tmp_path) as client:
        names = {family.name for family in text_string_to_metric_families(client.get("/metrics").text)}

    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= names
    assert {"python_info", "python_gc_collections"} <= names


def test_health_is_another_name_of_healthy(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        answers = [client.get(path) for path in ("/-/healthy", "/health")]

    assert [(200, "Healthy.\n")] * 2 == [(answer.status, answer.text) for answer in answers]


def test_the_metrics_are_at_the_telemetry_path_only(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.catch_up()
    server = http_server.listen("127.0.0.1:0", Site(follower, telemetry_path="/kv"))
    try:
        client = Client(server, follower)
        assert [200, 404] == [client.get(path).status for path in ("/kv", "/metrics")]
        assert 'href="/kv"' in client.get("/").text
    finally:
        server.shutdown()
        server.server_close()
        follower.close()


# --- systemd, and the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_in_one_datagram(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"@kvledger-{tmp_path}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1))
        receiver.settimeout(HANGS)
        monkeypatch.setenv(serve.VARIABLE, name)

        assert serve.tell_systemd(READY=1, STATUS="Serving")
        assert b"READY=1\nSTATUS=Serving" == receiver.recv(200)


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify"])
def test_without_systemd_nothing_is_sent(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.VARIABLE, address)

    assert not serve.tell_systemd(READY=1)


def test_everything_that_may_delay_the_end_takes_less_than_a_second() -> None:
    delays = serve.LATENCY_SECONDS + serve.STOP_SECONDS + http_server.POLL_SECONDS

    assert delays + serve.TELEMETRY_MILLISECONDS / 1e3 <= 1.0


def test_what_is_left_out_is_a_line_of_the_log_and_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "serve", lambda *_, **__: [say("Left out: a."), say("Left out: a.")])

    assert 0 == exit_code("serve", tmp_path, "--log.format", "json")
    (line,) = capsys.readouterr().err.splitlines()
    assert "Left out: a." == json.loads(line)["msg"]
