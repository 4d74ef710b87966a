"""Whatever text a journal holds: no command runs it, and everything that is written can be parsed.

Each journal has the text in another place: a field of the first event, of a request, of its labels, and of
an event of every other kind. All of them lie in one folder, which each command reads in each of its formats.
"""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pyarrow.parquet as pq
import pytest
from msgspec.structs import fields, replace
from tests import journals
from tests.command_line import exit_code
from tests.exporters.facts.test_kept_blocks import Engine
from tests.histories import events

from kvledger.audit import events as ev
from kvledger.audit.events import AnyEvent
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.writer import JournalWriter

pytestmark = pytest.mark.golden

HOSTILE = (
    "=1+1|\\|\"'`\n\r\x1b[2J::error::planted\n</script><script>planted()</script><img src=x onerror=p()>"
    "[a](javascript:p()) {{7*7}}{% raw %}{0} %s ${x} $(touch planted) ;touch planted # ../planted\u202e\\"
)
SETTINGS = ("model", "instance", "connector", "kv_role", "tool", HOSTILE)
STREAM: list[Any] = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
"""A request with a finding."""
REQUEST = next(event.request_id for event in STREAM if isinstance(event, ev.RequestAdded))
QUERY = "select * from TABLE order by all"
COMMANDS = (
    "audit {}",
    "why {}",
    "summary {}",
    "summary {} --by engine,model,lora,group",
    "summary blocks BLOCKS",
    "summary prefixes BLOCKS",
    "why turns BLOCKS",
    "whatif BLOCKS",
    "journals {}",
    "journals {} --audit",
    "diff {} {}",
    f"show {{}} {REQUEST}",
    *(f"query {{}} {table}" for table in ("requests", "findings", "engines", "causes", "activity")),
)
FORMATS = ("text", "table", "json", "csv", "markdown", "github")
CODES = {0, 1, 2, 3}


def of_type(kind: Any, text: str) -> Any:
    """A value of this type, with the text wherever it has one."""
    of = get_args(kind)
    if kind in (str, bool, int, float, bytes):
        return text if kind is str else kind()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(*(of_type(hints[field.name], text) for field in fields(kind)))
    if get_origin(kind) is dict:
        return {of_type(of[0], text): of_type(of[1], text)}
    if get_origin(kind) is list:
        return [of_type(of[0], text)] if of[0] is not int else []
    return next((of_type(one, text) for one in of if one is not type(None)), None)


def kinds_with_text() -> list[type]:
    """Every kind of event, but the first one and that of a request, that has a text somewhere."""
    kinds = [kind for kind in get_args(AnyEvent) if kind not in (ev.EngineStarted, ev.RequestAdded)]
    return [kind for kind in kinds if "planted" in repr(of_type(kind, "planted"))]


def texts_of(kind: type) -> list[str]:
    return [name for name, hint in get_type_hints(kind).items() if str in (hint, *get_args(hint))]


def streams() -> dict[str, tuple[ev.EngineStarted, list[Any]]]:
    """By the place of the text: the first event of a journal with a finding, and the others."""
    stream = STREAM
    started = replace(journals.STARTED, configuration={"model": "m"})
    found: dict[str, tuple[ev.EngineStarted, list[Any]]] = {}
    for name in texts_of(ev.EngineStarted):
        found[name] = replace(started, **{name: HOSTILE}), stream
    for name in SETTINGS:
        found[f"setting {len(found)}"] = replace(started, configuration={"model": "m", name: HOSTILE}), stream
    added = next(event for event in stream if isinstance(event, ev.RequestAdded))
    labels = {name: replace(ev.RequestLabels(), **{name: HOSTILE}) for name in texts_of(ev.RequestLabels)}
    changes: dict[str, Any] = {name: {"labels": one} for name, one in labels.items()}
    changes |= {name: {name: HOSTILE} for name in texts_of(ev.RequestAdded)}
    for name, change in changes.items():
        found[name] = started, [replace(added, **change) if event is added else event for event in stream]
    for kind in kinds_with_text():
        planted = replace(of_type(kind, HOSTILE), at=stream[-1].at)
        found[kind.__name__] = started, [*stream[:-1], planted, stream[-1]]
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for number, (started, stream) in enumerate(streams().values()):
        writer = JournalWriter(folder / f"engine-{number}-{number}-0")
        writer.rotate()
        writer.write([replace(started, process_id=number), ev.Snapshot(0, 0, [], 0), *stream])
        writer.write([ev.EngineStopped(stream[-1].at, "shutdown")])
        assert 0 == writer.lost_events
        writer.close()
    return folder


@pytest.fixture(scope="module")
def hostile_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of an engine at level blocks, with the text in every label and every request id."""
    engine = Engine(tmp_path_factory.mktemp("blocks") / "plain")
    engine.run(300)
    engine.stop()
    labels = of_type(ev.RequestLabels, HOSTILE)
    writer = JournalWriter(engine.path.parent.parent / "hostile" / "engine-00")
    writer.rotate()
    for number, event in read(engine.path):
        if isinstance(event, ev.RequestAdded):
            event = replace(event, request_id=f"{event.request}{HOSTILE}", labels=labels)
        if number < 2 or not isinstance(event, (ev.EngineStarted, ev.Snapshot)):
            writer.write([event])
    writer.close()
    return writer.folder.parent


def test_every_field_with_text_is_planted() -> None:
    assert {"request_id", "lora", "group", "session", "version", "HookFailed", "Snapshot"} <= {*streams()}
    assert 25 < len(streams())


class Tags(HTMLParser):
    """The tags of a page with their attributes, without their text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def require_page(text: str) -> None:
    tags = Tags()
    tags.feed(text)
    names = [tag for tag, _ in tags.found]
    assert "img" not in names and names.count("script") <= 2
    for _, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert "javascript:" not in (attributes.get("href") or "")


_UNESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\|")


def require_markdown(text: str) -> None:
    """Rows of a table have as many cells as its head; no tag and no link is what a text made."""
    head = 0
    for line in text.split("\n"):
        cells = len(_UNESCAPED.findall(line)) if line.startswith("|") else 0
        assert cells == head or not cells or not head, line
        head = cells
        assert not re.search(r"(?<!\\)(?:\\\\)*<(?:script|img)", line), line
        assert not re.search(r"(?<!\\)(?:\\\\)*\[a\]\(", line), line


def require_csv(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text), strict=True))
    assert {len(rows[0])} == {len(row) for row in rows}
    for cell in (cell for row in rows for cell in row):
        assert not re.match(r"[=+\-@\t\r]", cell) or re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", cell), cell


def require_printable(text: str) -> None:
    assert not [line for line in text.split("\n") if not line.isprintable()]
    assert not [line for line in text.split("\n") if line.startswith("::error::planted")]


def require_json(text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


PARSERS = {"json": require_json, "csv": require_csv, "markdown": require_markdown}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_can_be_parsed(
    command: str,
    hostile: Path,
    hostile_blocks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    formats = 0
    for format in FORMATS:
        words = command.replace("{}", str(hostile)).replace("BLOCKS", str(hostile_blocks)).split()
        if words[0] == "query":
            words[-1] = QUERY.replace("TABLE", words[-1])
        code = exit_code(*words, "--format", format)
        printed = capsys.readouterr()
        assert code in CODES, (format, printed.err)
        if code == 2:
            continue
        formats += 1
        require_printable(printed.err)
        if printed.out:
            if format != "csv":
                require_printable(printed.out)
            PARSERS.get(format, require_printable)(printed.out)
    assert formats
    assert [] == list(tmp_path.iterdir())


def test_what_is_written_can_be_parsed(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code("export", hostile, "-o", "tables") in CODES
    assert exit_code("export", "html", hostile, "-o", "page.html") in CODES
    assert exit_code("export", "timeline", hostile, "-o", "timeline.json") in CODES
    assert exit_code("journals", "compact", hostile) in CODES
    require_printable(capsys.readouterr().err)

    require_page(Path("page.html").read_text())
    require_json(Path("timeline.json").read_text())
    tables = [*Path("tables").rglob("*.parquet"), *hostile.rglob("*.parquet")]
    assert 100 < len(tables)
    for path in tables:
        pq.read_table(path)
    assert {"tables", "page.html", "timeline.json"} == {path.name for path in tmp_path.iterdir()}
    inside = {path.relative_to(hostile).parts[0] for path in hostile.rglob("*")}
    assert {".kvledger-facts"} == {name for name in inside if not name.startswith("engine-")}
