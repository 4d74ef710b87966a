"""A sidecar takes over the state folder that an older version of kvledger left.

``states/VERSION.tar.xz`` holds the checkpoint that this version wrote, and what it served at ``/metrics``.
The journals are those of ``tests/audit/replay/journals`` that JOURNALS names. Each release has such a
file; the first one will be that of 0.1.0. To add one, run this with that version in PYTHONPATH:

    python tests/exporters/sidecar/test_upgrade.py VERSION
"""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
STATES = Path(__file__).parent / "states"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in STATES.glob("*.tar.xz"))
JOURNALS = ("demo-0.32.0-tokens", "scheduler-0.32.0-tokens")
"""The last journal of the second has a torn tail."""

OTHER_LAYOUT = "checkpoint of another version"
FINDINGS = "kvledger_violations"
"""Invariants were added since, so a newer version finds more."""

Counters = dict[tuple[str, frozenset[tuple[str, str]]], float]


def unpack(folder: Path) -> Path:
    """The folder with the journals, which is made. The sidecar looks for journals directly in it."""
    folder.mkdir()
    for name in JOURNALS:
        with tarfile.open(ROOT / f"tests/audit/replay/journals/{name}.tar.xz") as opened:
            opened.extractall(folder, filter="data")
        for journal in (folder / name).iterdir():
            journal.rename(folder / journal.name)
        (folder / name).rmdir()
    return folder


def counters(families: Iterable[Any]) -> Counters:
    """The counters that engines have, summed over the engines: names of engines may change."""
    sums: Counters = defaultdict(float)
    for family in families:
        if family.type not in ("counter", "histogram") or family.name == FINDINGS:
            continue
        for sample in family.samples:
            if "engine" in sample.labels and not sample.name.endswith("_created"):
                labels = frozenset((key, text) for key, text in sample.labels.items() if key != "engine")
                sums[sample.name, labels] += sample.value
    return dict(sums)


def served(folder: Path, state: Path) -> tuple[Counters, dict[str, int]]:
    """What a sidecar of this version counts, and its losses by reason. Ends with a checkpoint."""
    from kvledger.exporters.metrics.prometheus import AuditCollector
    from kvledger.exporters.sidecar.follower import Follower

    follower = Follower(folder, state, lambda _: None)
    try:
        follower.catch_up()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AuditCollector(lambda: follower.audits, follower.lock))
        return counters(registry.collect()), dict(follower.health.lost)
    finally:
        follower.save()
        follower.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_counters_survive_an_upgrade(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another layout is a loss that is counted once, and the journals are read again."""
    journals = unpack(tmp_path / "journals")
    with tarfile.open(STATES / f"{version}.tar.xz") as opened:
        opened.extractall(tmp_path / "old", filter="data")
        written = opened.getmember("checkpoint").mtime
    (tmp_path / "old" / "checkpoint").chmod(0o600)
    before = counters(text_string_to_metric_families((tmp_path / "old" / "metrics").read_text()))
    monkeypatch.setattr(time, "time", lambda: written + 1.0)  # series of ended engines end after a day

    after, lost = served(journals, tmp_path / "old")

    assert before
    assert before == {key: after.get(key) for key in before}
    assert lost in ({}, {OTHER_LAYOUT: 1})
    assert (after, lost) == served(journals, tmp_path / "old")


def test_every_release_has_a_state() -> None:
    tags = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert {tag.removeprefix("v") for tag in tags.stdout.split()} <= set(VERSIONS)


def main(version: str) -> None:
    """Let the sidecar of the kvledger in PYTHONPATH read the journals, and keep its state."""
    with tempfile.TemporaryDirectory() as made, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        folder = Path(made)
        command = [sys.executable, "-m", "kvledger", "serve", str(unpack(folder / "journals"))]
        command += ["--state", str(folder / "state"), "--web.listen-address", address]
        sidecar = subprocess.Popen(command)
        metrics = _scraped(f"http://{address}/metrics")
        sidecar.terminate()
        sidecar.wait()
        STATES.mkdir(exist_ok=True)
        with tarfile.open(STATES / f"{version}.tar.xz", "w:xz") as archive:
            for name, data in (
                ("checkpoint", (folder / "state" / "checkpoint").read_bytes()),
                ("metrics", metrics),
            ):
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(data), int(time.time())
                archive.addfile(member, io.BytesIO(data))


def _scraped(url: str) -> bytes:
    for _ in range(100):
        time.sleep(0.3)
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return bytes(response.read())
        except OSError:
            continue
    raise SystemExit(f"{url} does not answer")


if __name__ == "__main__":
    main(sys.argv[1])
