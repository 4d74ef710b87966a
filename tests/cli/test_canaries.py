"""What a journal never holds stands in no output either: every command, in every format, and the sidecar.

A real scheduler serves requests whose prompts, salts, adapters' paths and images are canaries; a hook of ours
and the engine itself raise exceptions whose text is one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.msgpack import Decoder
from tests import journals
from tests.cli.test_hostile_text import COMMANDS, FORMATS, QUERY
from tests.command_line import exit_code
from tests.releases import ROOT, built
from tests.time_limits import RUN_HANGS

from kvledger.audit.events import AnyEvent, Event
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.metrics import metric_list
from kvledger.exporters.metrics.openmetrics import Exposition
from kvledger.exporters.metrics.values import EngineAudits, Health

TOKENS = tuple(range(70_000_001, 70_000_001 + 48 * 7, 7))
SALT, ADAPTER, IMAGE, HOOK = "canary-salt", "canary-adapter", "canary-image", "canary-hook"
ENGINE = "tokens 1 2 3 of"
"""What the scripted connector says of the prompt when it raises."""
REQUEST = "canary-id"
"""The id that the client chose is recorded: it shows that the search finds what is there."""


def planted(attach: Callable[[Any], object], **setup: Any) -> None:
    """Requests with everything that must not leave, and then an engine that fails."""
    from tests.scenarios.driving import engine_setup, images, lora
    from tests.scenarios.kv_runner import DriverWithCaches

    driver = DriverWithCaches(engine_setup(connector="scripted", **setup))
    attach(driver.scheduler)
    of_request = {"cache_salt": SALT, **lora("adapter", 1, f"/{ADAPTER}")}
    driver.add(REQUEST, TOKENS, max_tokens=3, of_request=of_request)
    driver.add("other", TOKENS, max_tokens=3, of_request=images((IMAGE, 0, 16)))
    for _ in range(3):
        driver.step()
    driver.connector.script.failing.add("get_num_new_matched_tokens")
    driver.add("last", TOKENS, max_tokens=3)
    with pytest.raises(AssertionError, match=ENGINE):
        driver.step()


def planted_in_sglang(attach: Callable[[Any], object]) -> None:
    """The same for SGLang's observer."""
    from tests.engines.sglang.small_scheduler import Batch, Request, Scheduler

    class Failing(Scheduler):
        def process_batch_result(self, batch: Any, result: Any) -> None:
            if result is not None:
                raise AssertionError(f"{ENGINE} {batch.reqs[0].origin_input_ids}")
            super().process_batch_result(batch, result)

    Failing.__module__ = Scheduler.__module__
    scheduler = Failing(lora_paths=[f"/{ADAPTER}"], chat_template=f"/{SALT}")
    attach(scheduler)
    for request_id in (REQUEST, "last"):
        request: Any = Request(request_id, prompt=len(TOKENS))
        request.origin_input_ids, request.extra_key, request.cache_salt = list(TOKENS), SALT, SALT
        request.lora_path, request.origin_input_text = f"/{ADAPTER}", SALT
        request.multimodal_inputs = request.mm_inputs = SimpleNamespace(mm_items=[IMAGE])
        scheduler._add_request_to_queue(request)
        scheduler.step(batch := Batch((request, 0, len(TOKENS))))
    with pytest.raises(AssertionError, match=ENGINE):
        scheduler.process_batch_result(batch, "fails")


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError(HOOK)


def observed(drive: Callable[[Callable[[Any], object]], None], level: str) -> list[Event]:
    """The events of an engine that is observed at a level."""
    from tests.engines.observed import observe
    from tests.scenarios.kv_runner import attach_content

    if level != "content":
        return observe(drive, level)[1]
    audits: list[Any] = []
    drive(lambda scheduler: audits.append(attach_content(scheduler)))
    audits[0].detach()
    decode = Decoder(list[AnyEvent]).decode
    return [each for batch in audits[0]._events for each in decode(batch)]


ENGINES = [("vllm", level) for level in ("tokens", "blocks", "content")] + [("sglang", "tokens")]


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from kvledger.audit.engines.sglang.observer import SGLangObserver
    from kvledger.audit.engines.v1_since_0_27 import V1Observer

    engine, level = request.param
    observer, drive = (SGLangObserver, planted_in_sglang) if engine == "sglang" else (V1Observer, planted)
    found = tmp_path_factory.mktemp(f"{engine}-{level}")
    streams = [observed(drive, level)]
    for name in sorted({name for hook in observer.HOOKS for name in (hook.before, hook.after) if name}):
        part, _, method = name.rpartition(".")
        if part and engine == "sglang":  # updates of weights, which nothing here asks for
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(getattr(V1Observer.PARTS, part) if part else observer, method, fails)
            streams.append(observed(drive, level))
    for number, stream in enumerate(streams):
        writer = JournalWriter(found / f"engine-{number}-{number}-0")
        writer.rotate()
        writer.write(stream)
        writer.close()
    require_no_canary(repr(streams), "the events")
    kinds = {type(event).__name__ for stream in streams for event in stream}
    assert {"HookFailed", "EngineRaised", "RequestAdded"} <= kinds
    assert level != "content" or {"ContentWatched", "ContentCounted"} <= kinds
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


def require_no_canary(text: str, name: str) -> None:
    for canary in (SALT, ADAPTER, IMAGE, HOOK, ENGINE):
        assert canary not in text, name
    assert not {*map(str, TOKENS)} & {*re.findall(r"\d{8}", text)}, name


@pytest.mark.golden
def test_no_output_holds_what_must_not_leave(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, outputs = 0, 0
    for name, text in everything(folder, tmp_path, capsys):
        outputs += 1
        found += REQUEST in text
        require_no_canary(text, name)

    assert 100 < outputs
    assert 10 < found


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.28.0", "0.33.0"])
def test_nor_does_it_with_another_release(release: str) -> None:
    releases = built(release)
    command = [releases.BIN / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    options = ["-m", "golden", "-k", "test_no_output and not sglang"]
    completed = subprocess.run(
        [*command, *options],
        env=releases.environ(release),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_HANGS,
    )

    assert 0 == completed.returncode and "3 passed" in completed.stdout, completed.stdout[-3000:]
