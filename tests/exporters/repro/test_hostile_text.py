"""Whatever text a journal holds, the test that `kvledger repro` writes and runs has it as constants only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import journals
from tests.exporters.repro.examples import STALE_LOOKUP
from tests.exporters.repro.test_pytest_file import EVERYTHING
from tests.exporters.repro.workloads import CASES
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStarted, EngineStopped, Event, RequestAdded, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.repro.choose_finding import choose
from kvledger.audit.repro.rebuild import SETTINGS, candidates, cut, require_rebuildable
from kvledger.audit.traffic.script import Check, Workload
from kvledger.exporters.repro import pytest_file
from kvledger.exporters.repro.pytest_file import render

PLAIN = "plain"
HOSTILE = (
    '0.32.0"""\nplanted = 1\n\'\'\'\nplanted = 1\n\r\f\t\0\u2028\x85\\"; planted = 1 \\\\" # '
    "{{ planted }} {% raw %} {planted} %s " + "a word and a longer line; " * 9 + "\\"
)
NEGATIVE = "tokens/negative"
CHECK = Check("reported", "r1", [-1, 2], [0, 1], "local and external tokens of r1", NEGATIVE)


def shape(text: str) -> str:
    """The syntax tree of a file without the values of its constants, and without the name of its test."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert node.name.isascii()
            node.name = "test_"
    return ast.dump(tree)


def require_constant(workload: Workload, plain: Workload, check: Check, plain_check: Check) -> None:
    """The file has the shape that it has with plain text, or is refused."""
    try:
        text = render(workload, check)
    except LedgerError:
        return
    assert shape(render(plain, plain_check)) == shape(text)


# --- from a journal -------------------------------------------------------------------------------------


def written(folder: Path, request_id: str, **fields: Any) -> Path:
    """A journal with a finding, whose first event has these fields."""
    stream: list[Event] = journals.reported(
        events(200, journals.CLEAN), local=-128, external=160, computed=168
    )
    stream = [
        msgspec.structs.replace(event, request_id=request_id) if isinstance(event, RequestAdded) else event
        for event in stream
    ]
    writer = JournalWriter(folder)
    writer.rotate()
    started = msgspec.structs.replace(journals.STARTED, **fields)
    writer.write([started, Snapshot(0, 0, [], 0), *stream, EngineStopped(1_000_000, "shutdown")])
    writer.close()
    return folder


def rebuilt(folder: Path) -> Workload:
    part = cut(choose(folder, NEGATIVE, None))
    require_rebuildable(part)
    return next(candidates(part)).workload


FIELDS = [field.name for field in msgspec.structs.fields(EngineStarted) if field.type is str]
CONFIGURATION = [*SETTINGS, "connector", "kv_role", "model", "instance", "sliding_window", "groups"]


def with_text(name: str, text: str) -> dict[str, Any]:
    """The text as a field of EngineStarted, or as one of its settings."""
    return {name: text} if name in FIELDS else {"configuration": {name: text}}


def test_every_text_field_is_planted() -> None:
    assert {"engine", "version", "adapter"} <= set(FIELDS)


@pytest.mark.parametrize("name", [name for name in (*FIELDS, *CONFIGURATION) if name != "level"])
def test_text_of_the_first_event_is_only_ever_a_constant(name: str, tmp_path: Path) -> None:
    folders = [
        written(tmp_path / each, "a", **with_text(name, value))
        for each, value in (("hostile", HOSTILE), ("plain", PLAIN))
    ]
    try:
        hostile, plain = map(rebuilt, folders)
    except LedgerError:
        return
    require_constant(hostile, plain, CHECK, CHECK)


def test_a_request_id_is_only_ever_a_constant(tmp_path: Path) -> None:
    folder = written(tmp_path / "hostile", HOSTILE)
    seen = choose(folder, NEGATIVE, None)
    check = msgspec.structs.replace(CHECK, request=seen.request_id, says=f"tokens of {seen.request_id}")
    workload = rebuilt(folder)
    require_constant(workload, workload, check, CHECK)


# --- every text of a workload and its check -------------------------------------------------------------


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a text is in plain data; the key of a dictionary is a place that ends with None."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict):
        for key, each in value.items():
            yield (*place, key, None)
            yield from places(each, (*place, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from places(each, (*place, number))


def planted(value: Any, place: tuple[Any, ...], text: str) -> Any:
    """The data with another text at one place."""
    if not place:
        return text
    first, *rest = place
    if rest == [None]:
        return {text if key == first else key: each for key, each in value.items()}
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[first] = planted(value[first], tuple(rest), text)
    return changed


NO_TEXT_OF_A_JOURNAL = {"probe", "do"}
"""Names of our own, as those of settings are."""


@pytest.mark.parametrize("case", [EVERYTHING, STALE_LOOKUP, *CASES.values()])
def test_no_text_of_a_workload_becomes_code(case: Any) -> None:
    data = msgspec.to_builtins({"workload": case.workload, "check": case.check})
    kinds = {"workload": Workload, "check": Check}
    for place in places(data):
        of_setting = place[:2] == ("workload", "engine") and place[-1] is None
        if of_setting or NO_TEXT_OF_A_JOURNAL & set(place):
            continue
        try:
            hostile, plain = (
                {name: msgspec.convert(planted(data, place, text)[name], kinds[name]) for name in kinds}
                for text in (HOSTILE, PLAIN)
            )
        except (msgspec.ValidationError, KeyError):
            continue
        require_constant(hostile["workload"], plain["workload"], hostile["check"], plain["check"])


@pytest.mark.parametrize("name", ["drafts", "block_size", "asynchronous", "sliding_window", "pooling"])
def test_a_setting_of_the_wrong_type_is_refused(name: str) -> None:
    workload = msgspec.structs.replace(EVERYTHING.workload, engine={name: HOSTILE})
    with pytest.raises(LedgerError, match="of the wrong type"):
        render(workload, EVERYTHING.check)


def test_a_header_that_ends_its_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the text not escaped, the finished file would be found out before it is written or run."""
    monkeypatch.setattr(pytest_file, "_escaped", str)
    monkeypatch.setattr(pytest_file, "_docstring", lambda text: f'"""{text}"""')
    workload = msgspec.structs.replace(EVERYTHING.workload, release='1.0"""; planted = 1; """')
    with pytest.raises(LedgerError, match="makes no file of it"):
        render(workload, EVERYTHING.check)
