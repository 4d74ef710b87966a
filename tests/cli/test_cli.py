"""The command line from outside: exit codes, one clear sentence, one JSON object."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests import journals
from tests.command_line import runner
from tests.histories import events

from kvledger import __version__, cli
from kvledger.audit.analysis.step_times import StepTimes
from kvledger.audit.events import SCHEMA, Gap, RequestAdded
from kvledger.audit.journal.format import header
from kvledger.audit.replay import checkpoint
from kvledger.cli_options import PANELS, RENAMED
from kvledger.exporters.sidecar.serve import state_folder

ROOT = Path(__file__).parents[2]
TEXTS = {".md", ".py", ".json", ".yaml", ".yml", ".txt", ".service", ".toml", ""}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line in this process."""

    return runner(capsys)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return journals.clean(tmp_path / "clean")


@pytest.fixture
def violated(tmp_path: Path) -> Path:
    return journals.violated(tmp_path / "violated")


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    return journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])


def segment(folder: Path) -> Path:
    return max(folder.glob("*.kvl"))


# --- audit ----------------------------------------------------------------------------------------


def test_a_clean_audit_exits_with_0(run: Any, clean: Path) -> None:
    outcome = run("audit", clean)

    assert (0, "") == (outcome.code, outcome.err)
    first, second, *_ = outcome.out.splitlines()
    assert first == "clean at level tokens: counts, progress; not examined: block contents, ownership"
    assert second == "1 request, 0 violations, 1 preemption"


def test_a_violated_audit_exits_with_1(run: Any, violated: Path) -> None:
    outcome = run("audit", violated)

    assert 1 == outcome.code
    assert "tokens/negative" in outcome.out


def test_an_unknown_audit_exits_with_3(run: Any, unknown: Path) -> None:
    outcome = run("audit", unknown)

    assert 3 == outcome.code
    assert "events were lost" in outcome.out


def test_violated_outweighs_unknown(run: Any, clean: Path, unknown: Path, violated: Path) -> None:
    assert 1 == run("audit", clean, unknown, violated).code
    assert 3 == run("audit", clean, unknown).code


def test_several_paths_make_one_audit(run: Any, clean: Path, violated: Path) -> None:
    data = json.loads(run("audit", clean, violated, "--format", "json").out)

    assert 2 == data["requests"] == len(data["journals"])


def test_a_single_segment_can_be_audited(run: Any, clean: Path) -> None:
    assert 0 == run("audit", segment(clean)).code


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("audit",), ("show", "x"), ("serve",)])
def test_a_missing_path_is_one_sentence(run: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    verb, *rest = words
    outcome = run(verb, tmp_path / "nowhere", *rest)

    assert 2 == outcome.code
    assert f"There is no {tmp_path / 'nowhere'}." == outcome.sentence


def test_an_empty_folder_is_bad_input(run: Any, tmp_path: Path) -> None:
    outcome = run("audit", tmp_path)

    assert 2 == outcome.code
    assert "is empty" in outcome.sentence


def test_a_folder_without_journals_is_bad_input(run: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    outcome = run("audit", tmp_path)

    assert 2 == outcome.code
    assert "holds no kvledger journal" in outcome.sentence


def test_a_file_that_is_not_a_journal_is_bad_input(run: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(os.urandom(1_000))
    outcome = run("audit", other)

    assert 2 == outcome.code
    assert f"{other} is not a kvledger journal." == outcome.sentence


def test_a_newer_schema_is_bad_input(run: Any, clean: Path) -> None:
    path = segment(clean)
    data = path.read_bytes()
    path.write_bytes(data.replace(header(SCHEMA), header(SCHEMA + 8), 1))
    outcome = run("audit", clean)

    assert 2 == outcome.code
    assert f"schema {SCHEMA + 8}" in outcome.sentence


def test_a_torn_tail_is_read_up_to_the_tear_and_makes_the_verdict_unknown(run: Any, tmp_path: Path) -> None:
    """What the tail held is not known."""
    folder = journals.write(tmp_path / "torn", events(200, journals.CLEAN))
    path = segment(folder)
    path.write_bytes(path.read_bytes()[:-3])
    outcome = run("audit", folder)

    assert 3 == outcome.code
    assert f"torn tail at {path.name} byte " in outcome.out
    assert "clean at level" not in outcome.out


def test_a_corrupted_segment_is_named_and_makes_the_verdict_unknown(run: Any, clean: Path) -> None:
    path = segment(clean)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    outcome = run("audit", clean)

    assert 3 == outcome.code
    assert path.name in outcome.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("audit",), "Missing argument"),
        (("audit", "x", "--format", "xml"), "'xml' is none of text, json, csv and github"),
        (("audit", "x", "--frmat", "json"), "No such option: --frmat"),
        (("adit",), "No such command 'adit'"),
        (("show", "x"), "Missing argument 'PATH'; write kvledger show PATH... REQUEST"),
        (("deploy", "helm", "-o", __file__), "can't be written: it is a file, not a folder"),
        (("deploy", "check", "--prometheus", "here"), "'here' is no URL of a Prometheus"),
        (("explain", "tokens/negativ"), "did you mean tokens/negative"),
        (("demo", "--inject", "nothing"), "There is no injection 'nothing'"),
        (("serve", "x", "--web.listen-address", "here"), "'here' is no listen address"),
        (("serve", "x", "--engine-url", "here"), "'here' is no URL of an engine's metrics"),
    ],
)
def test_bad_usage_is_one_sentence(run: Any, words: tuple[str, ...], expected: str) -> None:
    outcome = run(*words)

    assert 2 == outcome.code
    assert expected in outcome.sentence


def test_a_folder_without_read_permission_is_one_sentence(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", forbidden)
    monkeypatch.setattr(Path, "is_file", forbidden)

    for verb in ("audit", "summary"):
        outcome = run(verb, tmp_path)
        assert 2 == outcome.code
        assert f"{tmp_path} can't be read: Permission denied." == outcome.sentence


def test_without_a_command_help_is_printed(run: Any) -> None:
    outcome = run()

    assert 2 == outcome.code
    assert "Usage: kvledger" in outcome.out
    assert "" == outcome.err


# --- our own failures -------------------------------------------------------------------------------


def test_a_defect_of_kvledger_is_one_sentence_and_70(
    run: Any, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the sky\nfell")

    monkeypatch.setattr("kvledger.audit.replay.find.find_journals", broken)
    outcome = run("audit", clean)

    assert 70 == outcome.code
    assert "Kvledger itself failed (RuntimeError: the sky fell); --debug shows where." == outcome.sentence


def test_debug_prints_the_traceback_before_or_after_the_command(run: Any, tmp_path: Path) -> None:
    for words in (("--debug", "audit", tmp_path), ("audit", tmp_path, "--debug")):
        outcome = run(*words)
        assert 2 == outcome.code
        assert "Traceback" in outcome.err


def test_ctrl_c_prints_nothing_and_exits_with_130(
    run: Any, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvledger.audit.replay.find.find_journals", interrupted)
    outcome = run("audit", clean)

    assert (130, "", "") == (outcome.code, outcome.out, outcome.err)


def test_a_closed_pipe_prints_nothing_and_exits_with_141(tmp_path: Path) -> None:
    """kvledger audit ... | head -1"""
    for number in range(200):
        journals.clean(tmp_path / f"engine-{number}")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvledger", "audit", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()

    assert b"" == process.stderr.read()
    process.stderr.close()
    assert 141 == process.wait(30)


# --- the other verbs ----------------------------------------------------------------------------------


def test_version_is_printed(run: Any) -> None:
    assert f"{__version__}\n" == run("--version").out


def test_show_prints_entries_and_findings(run: Any, violated: Path) -> None:
    outcome = run("show", violated, "request-0")

    assert 0 == outcome.code
    assert "loaded 160 external tokens (repeat load: 88)" in outcome.out
    assert "tokens/negative" in outcome.out


def test_show_searches_several_paths(run: Any, clean: Path, violated: Path) -> None:
    assert "request-0" in run("show", clean, violated, "request-0").out


def test_show_searches_only_the_window(run: Any, clean: Path) -> None:
    outcome = run("show", clean, "request-0", "--until", "2001-01-01")

    assert 2 == outcome.code
    assert "is called 'request-0'" in outcome.sentence


def test_an_error_names_a_path_as_it_was_given(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No capital letter where a sentence begins with it."""
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)

    assert run("audit", "void").err.startswith("void is empty")


@pytest.mark.parametrize("form", ["html", "timeline"])
@pytest.mark.parametrize("output", ["", ".", "/"])
def test_an_output_that_is_a_folder_is_bad_input(run: Any, clean: Path, form: str, output: str) -> None:
    outcome = run("export", form, clean, "--output", output)

    assert 2 == outcome.code
    assert outcome.err.endswith("can't be written: it is a folder.\n")


@pytest.mark.parametrize("form", ["html", "timeline"])
def test_a_device_is_written_to_and_not_replaced(run: Any, clean: Path, tmp_path: Path, form: str) -> None:
    """A pipe is one too, and needs no root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    run("export", form, clean, "-o", pipe)
    out, _ = reader.communicate(timeout=30)

    assert pipe.is_fifo()
    assert b"request-0" in out


@pytest.mark.parametrize("form", ["html", "timeline"])
def test_a_full_disk_is_one_sentence_that_names_the_file(run: Any, clean: Path, form: str) -> None:
    outcome = run("export", form, clean, "-o", "/dev/full")

    assert 2 == outcome.code
    assert "/dev/full can't be written: No space left on device." == outcome.err.strip()


def test_a_request_id_outside_the_locale_is_escaped(tmp_path: Path) -> None:
    added = RequestAdded(0, 0, "b\u00fccher", 10)
    outcome = subprocess.run(
        [sys.executable, "-m", "kvledger", "show", journals.write(tmp_path / "one", [added]), "b\u00fccher"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )

    assert (0, "") == (outcome.returncode, outcome.stderr)
    assert "Account of b\\xfccher" in outcome.stdout


def test_output_to_a_full_disk_is_one_sentence(clean: Path) -> None:
    with open("/dev/full", "w") as full:
        outcome = subprocess.run(
            [sys.executable, "-m", "kvledger", "audit", clean], stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert 2 == outcome.returncode
    assert "The output can't be written: No space left on device.\n" == outcome.stderr


def test_with_standard_output_closed_the_exit_code_remains(violated: Path) -> None:
    command = f"exec {sys.executable} -m kvledger audit {violated} >&-"
    outcome = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)

    assert (1, "") == (outcome.returncode, outcome.stderr)


def test_explain_prints_an_invariant(run: Any) -> None:
    outcome = run("explain", "tokens/negative")

    assert 0 == outcome.code
    assert outcome.out.startswith("tokens/negative (violation)\n")


def test_explain_lists_every_invariant(run: Any) -> None:
    from kvledger.audit.checks.registry import catalogue

    outcome = run("explain")

    assert all(id in outcome.out for id in catalogue())


def test_explain_lists_the_terms_too(run: Any) -> None:
    from kvledger.audit.glossary import TERMS

    shown = " ".join(run("explain").out.split())

    assert all(name in shown for name in TERMS)


def test_explain_prints_a_term(run: Any) -> None:
    assert run("explain", "Planned-Split").out.startswith("planned split (term)\n")


# --- help -----------------------------------------------------------------------------------------------

NAMES = [each.name or each.callback.__name__ for each in cli.app.registered_commands if each.callback]


@pytest.mark.parametrize("width", ["80", "200"])
def test_help_is_one_screen_with_a_line_for_every_command(
    run: Any, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    lines = run("--help").out.splitlines()

    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    rows = [re.split(r" {2,}", line[14:], maxsplit=1) for line in lines[2:-1]]
    assert sorted(name for name in NAMES if " " not in name) == sorted(name for name, _ in rows)
    assert len(rows) <= 20
    for name, text in rows:
        second = [each.split()[1] for each in NAMES if each.startswith(f"{name} ")]
        assert text.endswith(f". [{'|'.join(second)}]" if second else ".")
    assert [*PANELS] == [line[:14].strip() for line in lines[2:-1] if line[0] != " "]


@pytest.mark.parametrize("verb", NAMES)
def test_help_of_a_command_starts_with_a_sentence_and_has_an_example(
    run: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*verb.split(), "--help").out.splitlines()

    assert lines[0].startswith(f"Usage: kvledger {verb}")
    assert lines[2].rstrip().endswith(".")
    assert any(line.startswith(f"    kvledger {verb}") for line in lines)
    assert max(len(line) for line in lines if not line.startswith("    kvledger ")) <= 80
    assert "list[Path]" not in "".join(lines)


def test_an_old_name_of_a_command_is_one_sentence_with_its_new_name(run: Any) -> None:
    commands: Any = typer.main.get_command(cli.app)
    table = (ROOT / "docs/upgrading.md").read_text()
    for old, new in RENAMED.items():
        outcome = run(old, "/nowhere", "--format", "json")
        assert (2, f"Write kvledger {new} in place of kvledger {old}.") == (outcome.code, outcome.sentence)
        names = re.split(", | or ", new)
        assert f"| `kvledger {old}` | {', '.join(f'`kvledger {each}`' for each in names)} |" in table
        assert old not in commands.commands and {*names} <= {*commands.commands, "--version"}


def test_nothing_names_a_command_as_it_was_called(run: Any) -> None:
    """Neither pages, messages, boards and rules, nor files to deploy."""
    names = "|".join(RENAMED)
    old = re.compile(rf"(?<![\w/.-])kvledger\s+({names})(?![\w.:=/-])|\"({names}) (\{{path}}|--)")
    history = {ROOT / "docs/upgrading.md", *(ROOT / "docs/decisions").glob("*.md")}
    parts = ("audit", "exporters", "dashboards", "docs", "proofs", "scripts", "benchmarks")
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.py"),
        *(each for part in parts for each in (ROOT / part).rglob("*")),
    ]
    found = [path for path in paths if path.is_file() and path.suffix in TEXTS and path not in history]
    texts = {path: path.read_text() for path in found}

    assert 300 < len(texts)
    assert [] == [(path, found.group()) for path, text in texts.items() for found in old.finditer(text)]


def test_help_of_a_command_lists_those_below_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "  summary prefixes  List the shared prefixes" in run("summary", "--help").out
    assert run("summary", "prefixes", "--help").out.startswith("Usage: kvledger summary prefixes ")
    assert "See also" not in run("summary", "prefixes", "--help").out


def test_a_folder_may_be_called_like_a_second_word(
    run: Any, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean.rename(clean.parent / "blocks")
    monkeypatch.chdir(clean.parent)
    for words in (("summary", "./blocks"), ("summary", "--", "blocks")):
        assert run(*words).out.startswith("1 request")


@pytest.mark.parametrize("name", ["--json", "--scheduler"])
def test_an_option_has_one_name(run: Any, clean: Path, name: str) -> None:
    outcome = run("diff", clean, clean, name)

    assert 2 == outcome.code
    assert outcome.sentence.startswith(f"No such option: {name}")


def test_an_address_without_a_dask_scheduler_is_one_sentence(run: Any, clean: Path) -> None:
    outcome = run("audit", clean, "--dask", "127.0.0.1:1")

    assert (2, "No Dask scheduler answers at 127.0.0.1:1.") == (outcome.code, outcome.sentence)


def test_the_demo_without_vllm_says_what_to_install(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run("demo", "--keep", tmp_path / "demo")

    assert 2 == outcome.code
    assert "pip install vllm" in outcome.sentence
    assert not (tmp_path / "demo").exists()


def test_injections_are_listed_without_vllm(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run("demo", "--inject", "list")

    assert 0 == outcome.code
    assert "negative-local-hit" in outcome.out and "promise-not-loaded" in outcome.out


def test_export_prints_the_rows_of_each_file(run: Any, clean: Path, tmp_path: Path) -> None:
    outcome = run("export", clean, "-o", tmp_path / "tables")

    assert (0, "") == (outcome.code, outcome.out)
    assert f"{tmp_path}/tables/requests.parquet: 1 rows" in outcome.err.splitlines()


def test_export_leaves_out_the_table_of_entries_unless_asked(run: Any, clean: Path, tmp_path: Path) -> None:
    run("export", clean, "-o", tmp_path / "usual")
    run("export", clean, "-o", tmp_path / "all", "--entries")
    run("export", clean, "-o", tmp_path / "two", "--table", "requests", "--entries")

    usual, whole, two = (
        {path.stem for path in (tmp_path / name).glob("*.parquet")} for name in ("usual", "all", "two")
    )
    assert {"entries"} == whole - usual
    assert {"requests", "entries"} == two


def test_a_missing_extra_is_named(
    run: Any, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvledger.exporters.trace.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    outcome = run("export", clean, "-o", tmp_path / "tables")

    assert 2 == outcome.code
    assert outcome.sentence.endswith("pip install duckdb pandas pyarrow.")


def test_timeline_writes_a_file(run: Any, clean: Path, tmp_path: Path) -> None:
    outcome = run("export", "timeline", clean, "-o", tmp_path / "t.json")

    assert (0, "") == (outcome.code, outcome.out)
    assert "trace events" in outcome.err
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_timeline_prints_to_standard_output(run: Any, clean: Path) -> None:
    assert json.loads(run("export", "timeline", clean, "-o", "-").out)["traceEvents"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_scrapes_until_a_signal_stops_it(clean: Path, ending: signal.Signals) -> None:
    """Then it saves once more, says nothing, and ends with 0."""
    command = [sys.executable, "-m", "kvledger", "serve", str(clean)]
    process = subprocess.Popen(
        [*command, "--web.listen-address", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts us in the background has it ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split()[-1]
        with urllib.request.urlopen(url, timeout=30) as answer:
            shown = answer.read().decode()
        (clean / ".kvledger" / "checkpoint").unlink()
    finally:
        process.send_signal(ending)
        rest = process.stderr.read()
        process.stderr.close()
        code = process.wait(30)

    assert 'source="external"} 104.0' in shown
    assert ("", 0) == (rest, code)
    assert (clean / ".kvledger" / "checkpoint").exists()


def test_serve_rejects_a_state_that_is_a_file(run: Any, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")
    outcome = run("serve", clean, "--web.listen-address", ":0", "--state", tmp_path / "state")

    assert (2, f"{tmp_path / 'state'} can't be written: File exists.") == (outcome.code, outcome.sentence)


def test_serve_rejects_a_state_that_another_serve_uses(run: Any, clean: Path, tmp_path: Path) -> None:
    held = checkpoint.take(tmp_path / "state")
    outcome = run("serve", clean, "--web.listen-address", ":0", "--state", tmp_path / "state")
    os.close(held)

    assert 2 == outcome.code
    assert outcome.sentence.startswith(f"Another kvledger serve keeps its state in {tmp_path / 'state'};")


def test_serve_rejects_a_wrong_web_configuration(run: Any, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("tls_config: {}")
    outcome = run("serve", clean, "--web.config.file", tmp_path / "web.yml")

    assert 2 == outcome.code
    assert "contains unknown field `tls_config`" in outcome.sentence


@pytest.mark.parametrize("library", ["yaml", "bcrypt"])
def test_serve_names_the_missing_web_extra(
    run: Any, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """Only a configuration asks for it."""
    for name in ("web_config", "web_users"):
        monkeypatch.delitem(sys.modules, f"kvledger.exporters.sidecar.{name}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "web.yml").write_text("basic_auth_users: {a: b}")
    outcome = run("serve", clean, "--web.config.file", tmp_path / "web.yml")

    assert 2 == outcome.code
    assert f"needs {library}, which is not installed" in outcome.sentence
    assert "pip install bcrypt pyyaml" in outcome.sentence


def test_a_folder_that_cannot_be_written_keeps_no_checkpoint(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(os, "access", lambda *_: False)

    assert state_folder(clean, sentences.append) is None
    assert [
        f"No checkpoint is kept, because {clean} can't be written. Name a folder with --state."
    ] == sentences


# --- the first lines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("audit",), "violated at level tokens: counts, progress; not examined: block contents, ownership"),
        (("why",), "200 prompt tokens: 104 hits (52.0 %)."),
        (("summary",), "1 request, 1 preemption, 0.0 s spent waiting."),
        (("show", "request-0"), "Account of request-0: 200 prompt tokens: 104 external, 96 computed."),
        (("diff", "."), "Hits stayed the same: 52.0 % and 52.0 % of prompt tokens."),
    ],
)
def test_the_first_line_is_the_answer(
    run: Any, violated: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], first: str
) -> None:
    monkeypatch.chdir(violated)
    verb, *rest = words

    assert first == run(verb, violated, *rest).out.splitlines()[0]


# --- analysis -------------------------------------------------------------------------------------------


def test_report_exits_with_the_code_of_the_audit(run: Any, violated: Path, tmp_path: Path) -> None:
    outcome = run("export", "html", violated, "-o", tmp_path / "page.html")

    assert (1, "") == (outcome.code, outcome.out)
    assert outcome.err.startswith("violated at level tokens: counts, progress; ")
    assert outcome.err.endswith(f"Wrote {tmp_path / 'page.html'}; open it in a browser.\n")
    assert "<!doctype html>" in run("export", "html", violated, "-o", "-").out


def test_tail_of_ended_engines_prints_totals_and_ends(run: Any, clean: Path) -> None:
    outcome = run("audit", "follow", clean)

    assert (0, "") == (outcome.code, outcome.err)
    assert outcome.out.startswith("clean at level tokens: counts, progress; ")


@pytest.mark.parametrize("verb", ["audit", "summary", "why"])
def test_an_empty_window_has_no_requests(run: Any, clean: Path, verb: str) -> None:
    data = json.loads(run(verb, clean, "--until", "2001-01-01", "--format", "json").out)

    assert 0 == (data[0] if isinstance(data, list) else data)["requests"]


def test_a_quoted_pattern_is_expanded(run: Any, clean: Path) -> None:
    assert 0 == run("audit", f"{clean.parent}/cl*").code
    assert "No path matches" in run("audit", f"{clean.parent}/no*").sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "x", "--format", "xml"), "'xml' is none of table, json and csv"),
        (("summary", "x", "--since", "soon"), "'soon' is no time"),
        (("audit", "x", "--jobs", "-2"), "-2 processes can't be"),
        (("completion", "tcsh"), "'tcsh' is none of bash, zsh and fish"),
    ],
)
def test_a_bad_option_value_is_one_sentence(run: Any, words: tuple[str, ...], sentence: str) -> None:
    outcome = run(*words)

    assert 2 == outcome.code
    assert sentence in outcome.sentence


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(run: Any, shell: str) -> None:
    assert "_KVLEDGER_COMPLETE" in run("completion", shell).out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("summ", ["summary"]),
        ("summary ", ["prefixes", "store", "blocks"]),
        ("why t", ["turns"]),
        ("why turns --ses", ["--session"]),
        ("why journals t", []),
    ],
)
def test_the_completion_script_completes_commands(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KVLEDGER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kvledger {typed}")
    monkeypatch.setenv("COMP_CWORD", str(1 + typed.count(" ")))

    assert offered == runner(capsys)().out.split()


def test_the_command_line_imports_nothing_heavy() -> None:
    """Help is quick, and works where vLLM, torch and pandas are not installed."""
    program = (
        "import sys, kvledger.cli\n"
        "heavy = {'vllm', 'torch', 'pandas', 'numpy', 'rich.progress', 'prometheus_client', 'msgspec'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "[]\n" == outcome.stdout


def test_a_list_of_journals_imports_no_audit_and_no_templates(clean: Path) -> None:
    program = (
        "import atexit, sys\n"
        "from kvledger.cli import main\n"
        "heavy = {'jinja2', 'multiprocessing', 'rich.progress', 'kvledger.audit.checks',\n"
        "  'kvledger.audit.analysis.whatif', 'kvledger.audit.replay.journals'}\n"
        "atexit.register(lambda: print(sorted(heavy & sys.modules.keys()), file=sys.stderr))\n"
        "main()"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, "journals", str(clean)], capture_output=True, text=True, check=True
    )

    assert "1 journal" in outcome.stdout
    assert "[]\n" == outcome.stderr


def test_reading_a_journal_imports_no_engine(clean: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('vllm', 'torch', 'pandas', 'lmcache')))\n"
        "from kvledger.cli import main\n"
        "main()"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, "audit", str(clean)], capture_output=True, text=True
    )

    assert (0, "") == (outcome.returncode, outcome.stderr)


@pytest.mark.parametrize(("format", "priced"), [("csv", False), ("github", False), ("json", True)])
def test_audit_prices_lost_work_only_where_it_is_printed(
    run: Any, clean: Path, monkeypatch: pytest.MonkeyPatch, format: str, priced: bool
) -> None:
    observed: list[int] = []
    monkeypatch.setattr(StepTimes, "_observe", lambda self, *_: observed.append(1))

    assert 0 == run("audit", clean, "--format", format).code

    assert priced == bool(observed)


@pytest.mark.parametrize(("fail_on", "code"), [("violation", 0), ("drift", 1)])
def test_a_drift_fails_only_an_audit_that_asks_for_it(
    run: Any, tmp_path: Path, fail_on: str, code: int
) -> None:
    """The request ends before its first output: no figure of the engine has its prompt."""
    journal = journals.write(
        tmp_path / "one", events(300, "A0+0 s128 o F"), configuration={"figures": "first"}
    )

    assert code == run("audit", journal, "--fail-on", fail_on).code


def test_a_command_without_a_path_reads_the_folder_of_the_variable(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journals.clean(tmp_path / "engine-0")
    assert "write kvledger audit PATH..." in run("audit").sentence
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    for words in (("audit",), ("journals",), ("show", "request-0")):
        assert 0 == run(*words).code, words
    assert "write kvledger diff BEFORE AFTER" in run("diff").sentence
