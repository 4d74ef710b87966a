"""A real deployment from end to end: server, plugin, sidecar, Prometheus, boards.

The tests run in the order in which they stand: each continues where the one before left off.
The journal lies on a small volume of its own where that can be mounted, for the disk to fill up.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests import journals
from tests.serving.processes import SETTLE_SECONDS, Engine, Prometheus, Sidecar, wait_until

from kvledger.audit.demo.model import VOCABULARY_TOKENS
from kvledger.dashboards import boards, check, deploy_files
from kvledger.exporters.metrics.metric_list import METRICS
from kvledger.exporters.sidecar.engine_metrics import WINDOW_SECONDS

pytestmark = pytest.mark.serving

ENDED = "sum(kvledger_prompt_tokens_total)"
SOURCES = "sum by (source) (kvledger_prompt_tokens_total)"
SILENT = {"kvledger: Trust, Last findings"}
"""The table of findings is empty until there is a finding; the last test makes one."""


def in_row(name: str, title: str) -> set[str]:
    """The panels of a row of a board, as the check names them."""
    board = boards.board(name)
    (panels,) = [within for heading, within in boards.rows(board) if title == heading["title"]]
    return {f"{board['title']}, {panel['title']}" for panel in panels}


LEVEL_BLOCKS = {
    *in_row("tokens", "Blocks (engines that record at level blocks)"),
    "kvledger: Tokens, Reused of what turns could have reused",
    "engine:kvledger_turn_prompt_tokens_hit:ratio_rate1h",
}
LEVEL_CONTENT = in_row("trust", "Contents (engines that record at level content)")
KV_EVENTS = {
    *in_row("trust", "KV events (engines that publish them, with a recording)"),
    *in_row("tokens", "Routing: what KV events promised, and what requests found"),
}
"""These panels have data of engines that record at these levels only; this one records tokens, and publishes
no KV events."""

UNTIL_A_MODEL = {"kvledger: Tokens, Lost engine time"}
"""The error of the step model has no data before a model was fitted, which takes more steps than these."""


@dataclass
class Deployment:
    """The three processes, and the requests that clients have sent so far."""

    engine: Engine
    sidecar: Sidecar
    prometheus: Prometheus
    journals: Path
    mounted: bool
    prompt_tokens: int = 0
    requests: int = 0

    def crowd(self, requests: int, name: str) -> None:
        """Send more requests at once than the blocks can hold, each with its own prompt."""
        dice = random.Random(name)
        prompts = [[dice.randrange(2, VOCABULARY_TOKENS) for _ in range(65)] for _ in range(requests)]
        with ThreadPoolExecutor(12) as clients:
            came = list(clients.map(lambda prompt: self.engine.complete(prompt, 60), prompts))
        assert all(came)
        self._count(prompts)

    def one_by_one(self, prompts: list[list[int]]) -> None:
        """Send requests one after the other, so that the connector can match each."""
        for prompt in prompts:
            assert self.engine.complete(prompt, 5)
        self._count(prompts)

    def give_up(self, prompt: list[int]) -> None:
        self.engine.give_up(prompt, 200)
        self._count([prompt])

    def _count(self, prompts: list[list[int]]) -> None:
        self.prompt_tokens += sum(map(len, prompts))
        self.requests += len(prompts)

    def settled(self) -> None:
        """Wait until Prometheus has seen the end of every request."""
        wait_until(
            lambda: self.prometheus.value(ENDED) == self.prompt_tokens,
            SETTLE_SECONDS,
            lambda: f"{self.prometheus.value(ENDED)} of {self.prompt_tokens} prompt tokens",
        )


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    place = folder / "journals"
    place.mkdir()
    mounted = _failed("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)) is False
    engine = Engine(folder, place)
    sidecar = Sidecar(folder, place, engine)
    prometheus = Prometheus(folder, {"vllm": engine, "kvledger": sidecar}, deploy_files.write_rules(folder))
    started = [prometheus, sidecar, engine]
    try:
        for process in started:
            process.start()
        yield Deployment(engine, sidecar, prometheus, place, mounted)
    finally:
        for process in started:
            process.kill()
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=False)


def _failed(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError:
        return True


@contextlib.contextmanager
def full(volume: Path) -> Iterator[None]:
    """Leave no room on a volume, also where the sidecar replaces a file by a smaller one meanwhile."""
    filler = volume / "filler"
    ends = threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not ends.is_set():
                with contextlib.suppress(OSError):
                    while file.write(os.urandom(1 << 12)):
                        pass
                ends.wait(0.02)

    writer = threading.Thread(target=fill)
    writer.start()
    try:
        wait_until(lambda: os.statvfs(volume).f_bavail == 0, SETTLE_SECONDS)
        yield
    finally:
        ends.set()
        writer.join()
        filler.unlink()


def prompts_of(name: str, count: int) -> list[list[int]]:
    """Prompts of a bit more than two blocks that share the first block."""
    dice = random.Random(name)
    shared = [dice.randrange(2, VOCABULARY_TOKENS) for _ in range(32)]
    return [[*shared, *(dice.randrange(2, VOCABULARY_TOKENS) for _ in range(38))] for _ in range(count)]


def test_every_prompt_token_is_settled_once(deployment: Deployment) -> None:
    """Local hits, external hits after a cache reset, preemptions, and clients that disconnect."""
    prompts = prompts_of("matched", 6)
    deployment.one_by_one([*prompts, *prompts])
    deployment.engine.reset_cache()
    deployment.one_by_one(prompts)
    deployment.crowd(24, "crowd")
    deployment.give_up(prompts_of("left", 1)[0])
    deployment.settled()

    by_source = {labels["source"]: value for labels, value in deployment.prometheus.series(SOURCES)}
    assert by_source["local"] >= 6 * 64
    assert by_source["external"] >= 64
    assert deployment.prompt_tokens == sum(by_source.values())


def test_preemptions_cost_rework_and_are_counted(deployment: Deployment) -> None:
    ask = deployment.prometheus.value

    assert (ask("sum(kvledger_preemptions_total)") or 0) > 0
    assert (ask('sum(kvledger_work_tokens_total{kind="rework"})') or 0) > 0
    wait_until(
        lambda: ask("sum(kvledger_preemptions_total)") == ask("sum(vllm:num_preemptions_total)"),
        SETTLE_SECONDS,
    )


def test_every_request_is_counted_and_clean(deployment: Deployment) -> None:
    ask = deployment.prometheus.value

    assert deployment.requests == ask("sum(kvledger_requests_total)")
    assert deployment.requests == ask('sum(kvledger_requests_total{verdict="clean"})')
    assert 0 == ask('sum(kvledger_violations_total{severity="violation"})')
    assert 1 == ask('sum(kvledger_requests_total{outcome="aborted"})')


def test_every_difference_to_the_engines_counters_has_a_cause(deployment: Deployment) -> None:
    ask = deployment.prometheus.value

    wait_until(lambda: (ask("sum(kvledger_reconciliation_engine)") or 0) > 0, SETTLE_SECONDS)
    assert 0 == ask('sum(abs(kvledger_reconciliation_drift{cause="unexplained"}))')
    assert 1 == ask("min(kvledger_reconciliation_up)")


def test_every_panel_and_rule_returns_data(deployment: Deployment) -> None:
    """An alert that does not fire returns no data; Prometheus only has to accept its expression."""
    answers = list(check.ask(deployment.prometheus.address))
    alerts = {rule["alert"] for rule in deploy_files.rules() if "alert" in rule}
    empty = {answer.query.where for answer in answers if not answer.series}

    assert [] == [answer for answer in answers if answer.error]
    assert set() == empty - alerts - SILENT - UNTIL_A_MODEL - LEVEL_BLOCKS - LEVEL_CONTENT - KV_EVENTS
    shown = sum(1 for answer in answers if answer.series)
    print(f"{shown} of {len(answers)} expressions returned data")


def test_a_killed_sidecar_resumes_without_a_counter_reset(deployment: Deployment) -> None:
    deployment.sidecar.kill()
    deployment.crowd(12, "unwatched")
    deployment.sidecar.start()
    deployment.settled()

    assert [] == resets(deployment)


def test_a_killed_prometheus_sees_no_counter_reset(deployment: Deployment) -> None:
    deployment.prometheus.kill()
    deployment.crowd(12, "unscraped")
    deployment.prometheus.start()
    deployment.settled()

    assert [] == resets(deployment)


def test_a_full_disk_loses_events_and_no_answers(deployment: Deployment) -> None:
    if not deployment.mounted:
        pytest.skip("no volume of its own could be mounted for the journal")
    ask = deployment.prometheus.value
    before = ask("sum(kvledger_requests_total)")
    with full(deployment.journals):
        deployment.crowd(24, "on a full disk")
    deployment.crowd(24, "on a free one")

    wait_until(lambda: (ask("sum(kvledger_gaps_total)") or 0) > 0, SETTLE_SECONDS)
    wait_until(lambda: (ask("sum(kvledger_requests_total)") or 0) >= (before or 0) + 24, SETTLE_SECONDS)
    assert 0 == ask('sum(kvledger_violations_total{severity="violation"})')
    assert [] == resets(deployment)
    deployment.prompt_tokens = int(ask(ENDED) or 0)


def test_a_restarted_engine_continues_its_series(deployment: Deployment) -> None:
    """Its own counters are compared anew, once the sidecar has followed it for a window."""
    ask = deployment.prometheus.value
    before = ask(ENDED) or 0
    deployment.engine.kill()
    wait_until(lambda: ask('sum(kvledger_engine_state{state="dead"})') == 1, SETTLE_SECONDS)
    deployment.engine.start()
    deployment.crowd(12, "after the fall")

    wait_until(lambda: (ask(ENDED) or 0) >= before + 12 * 65, SETTLE_SECONDS)
    assert 1 == ask("sum(kvledger_engine_observed)")
    assert 1 == ask("count(kvledger_engine_info)")
    assert [] == resets(deployment)
    unexplained = 'sum(abs(kvledger_reconciliation_drift{cause="unexplained"}))'
    wait_until(lambda: ask(unexplained) is not None, SETTLE_SECONDS + WINDOW_SECONDS)
    assert 0 == ask(unexplained)


def test_a_finding_reaches_the_board_and_the_alert(deployment: Deployment) -> None:
    """A second journal appears in the folder; its engine reports -128 local tokens."""
    ask = deployment.prometheus.value
    journals.violated(deployment.journals / "engine-9-9-9", time.time())

    wait_until(lambda: (ask('sum(kvledger_violations_total{severity="violation"})') or 0) > 0, SETTLE_SECONDS)
    firing = 'count(ALERTS{alertname="KvledgerCountsWrong", alertstate="firing"})'
    wait_until(lambda: (ask(firing) or 0) > 0, SETTLE_SECONDS)
    answers = list(check.ask(deployment.prometheus.address))
    assert SILENT <= {answer.query.where for answer in answers if answer.series}


def resets(deployment: Deployment) -> list[str]:
    """kvledger's counters that fell; no kill may cause one."""
    counters = [metric.exposed for metric in METRICS if metric.kind == "counter"]
    return [name for name in counters if deployment.prometheus.value(f"sum(resets({name}[1h])) > 0")]
