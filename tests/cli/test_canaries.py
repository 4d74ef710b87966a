"""What a journal never holds stands in no output either: every command, in every format, and the sidecar.

A real scheduler serves requests whose prompts, salts, adapters' paths and images are canaries; a hook of ours
and the engine itself raise exceptions whose text is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests import journals
from tests.cli.test_hostile_text import COMMANDS, FORMATS, QUERY
from tests.command_line import exit_code

from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.metrics import metric_list
from kvledger.exporters.metrics.openmetrics import Exposition
from kvledger.exporters.metrics.values import EngineAudits, Health

pytestmark = pytest.mark.golden

TOKENS = tuple(range(70_000_001, 70_000_001 + 48 * 7, 7))
SALT, ADAPTER, IMAGE, HOOK = "canary-salt", "canary-adapter", "canary-image", "canary-hook"
ENGINE = "tokens 1 2 3 of"
"""What the scripted connector says of the prompt when it raises."""
REQUEST = "canary-id"
"""The id that the client chose is recorded: it shows that the search finds what is there."""


def planted(attach: Callable[[Any], object], **setup: Any) -> Any:
    """Requests with everything that must not leave, and then an engine that fails."""
    from tests.scenarios.driving import images, lora, start

    driver = start(attach, connector="scripted", **setup)
    of_request = {"cache_salt": SALT, **lora("adapter", 1, f"/{ADAPTER}")}
    driver.add(REQUEST, TOKENS, max_tokens=3, of_request=of_request)
    driver.add("other", TOKENS, max_tokens=3, of_request=images((IMAGE, 0, 16)))
    for _ in range(3):
        driver.step()
    driver.connector.script.failing.add("get_num_new_matched_tokens")
    driver.add("last", TOKENS, max_tokens=3)
    with pytest.raises(AssertionError, match=ENGINE):
        driver.step()
    return driver


@pytest.fixture(scope="module", params=["tokens", "blocks"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from tests.engines.observed import observe
    from tests.engines.test_observer import OBSERVERS

    from kvledger.audit.engines.v1_since_0_27 import V1Observer

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(HOOK)

    found = tmp_path_factory.mktemp(request.param)
    streams = [observe(planted, request.param)[1]]
    for name in OBSERVERS:
        part, _, method = name.rpartition(".")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(getattr(V1Observer.PARTS, part) if part else V1Observer, method, fails)
            streams.append(observe(planted, request.param)[1])
    for number, stream in enumerate(streams):
        writer = JournalWriter(found / f"engine-{number}-{number}-0")
        writer.rotate()
        writer.write(stream)
        writer.close()
    kinds = {type(event).__name__ for stream in streams for event in stream}
    assert {"HookFailed", "EngineRaised", "RequestAdded"} <= kinds
    return found


def everything(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    """By what wrote it: the text of every output."""
    for command in COMMANDS:
        words = command.replace("{}", str(folder)).replace("BLOCKS", str(folder)).split()
        if words[0] == "query":
            words[-1] = QUERY.replace("TABLE", words[-1])
        for format in FORMATS:
            exit_code(*words, "--format", format)
            printed = capsys.readouterr()
            yield f"{command} --format {format}", printed.out + printed.err
    for kind, name in (("", "tables"), ("html", "page.html"), ("timeline", "timeline.json")):
        exit_code(*f"export {kind} {folder} -o {out / name}".split())
    exit_code("journals", "compact", folder)
    audits = EngineAudits(journals.followed_audits(folder), Health())
    yield "metrics", Exposition().text(metric_list.collect(audits))
    for path in [*out.rglob("*"), *folder.rglob("*")]:
        if path.suffix == ".parquet":
            yield path.name, str(pq.read_table(path).to_pydict())
        elif path.is_file():
            yield path.name, path.read_bytes().decode("latin-1")


def test_no_output_holds_what_must_not_leave(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, outputs = 0, 0
    tokens = {str(token) for token in TOKENS}
    for name, text in everything(folder, tmp_path, capsys):
        outputs += 1
        found += REQUEST in text
        for canary in (SALT, ADAPTER, IMAGE, HOOK, ENGINE):
            assert canary not in text, name
        assert not tokens & set(re.findall(r"\d{8}", text)), name

    assert 100 < outputs
    assert 10 < found
