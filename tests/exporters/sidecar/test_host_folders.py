"""The sidecar follows the folders of several hosts below one path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.exporters.sidecar.test_follower import Engine, ended, following

from kvledger.exporters.metrics.values import engine_label
from kvledger.exporters.sidecar import follower
from kvledger.exporters.sidecar.follower import Follower

NAME = "engine-1-7-0"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.0)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    """Live engines of two hosts, alike in everything but the folder."""
    both = [Engine(tmp_path / host / NAME, model="m") for host in ("a", "b")]
    for engine in both:
        engine.serve()
    yield both
    for engine in both:
        engine.stop()


def labels(follower: Follower) -> list[str]:
    return [engine_label(engine_audit) for engine_audit in follower.audits]


def test_engines_of_two_hosts_have_two_series(tmp_path: Path, engines: list[Engine]) -> None:
    with following(tmp_path) as follower:
        assert ["m / engine 0 in a", "m / engine 0 in b"] == labels(follower)
        assert ["vllm 0.32.0 pid 4000 in a", "vllm 0.32.0 pid 4000 in b"] == [
            engine_audit.name for engine_audit in follower.audits
        ]
        assert 2 == ended(follower)


def test_the_label_of_a_named_engine_has_the_host_once(tmp_path: Path) -> None:
    named = {"model": "m", "instance_given": True}
    for host, instance in (("a", "a"), ("b", "left")):
        journals.write(tmp_path / host / NAME, [], configuration={**named, "instance": instance})
    with following(tmp_path) as follower:
        assert ["m / engine 0 on a", "m / engine 0 on left in b"] == labels(follower)


def test_a_host_that_appears_later_is_followed(tmp_path: Path) -> None:
    """Beside a flat folder's engine, which keeps its label."""
    flat = Engine(tmp_path / NAME, model="m")
    flat.serve()
    with following(tmp_path) as follower:
        (tmp_path / "c").mkdir()
        follower.poll()
        assert ["m / engine 0"] == labels(follower)
        later = Engine(tmp_path / "c" / NAME, model="m")
        later.serve()
        follower.poll()
        assert ["m / engine 0", "m / engine 0 in c"] == sorted(labels(follower))
        second = Engine(tmp_path / "c" / "engine-2-7-0", model="m")
        follower.poll()
        assert ["m / engine 0", "m / engine 0 in c", "m / engine 1 in c"] == sorted(labels(follower))
    for engine in (flat, later, second):
        engine.stop()


def test_a_restart_counts_no_host_twice(tmp_path: Path, engines: list[Engine]) -> None:
    with following(tmp_path) as follower:
        follower.save()
    engines[1].serve()
    with following(tmp_path) as follower:
        assert ["a/" + NAME, "b/" + NAME] == sorted(follower.journals)
        assert ["m / engine 0 in a", "m / engine 0 in b"] == labels(follower)
        assert [1, 2] == [engine_audit.closed.requests for engine_audit in follower.audits]
        assert {} == follower.health.lost


def test_a_host_that_cannot_be_listed_for_a_while_loses_nothing(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    notified: list[str] = []
    scandir = os.scandir

    def stale(path: Any) -> Any:
        if Path(path) == tmp_path / "b":
            raise OSError(116, "Stale file handle")
        return scandir(path)

    with following(tmp_path, notified=notified) as follower:
        monkeypatch.setattr(os, "scandir", stale)
        for engine in engines:
            engine.serve()
        follower.poll()
        assert 4 == ended(follower) and 2 == len(follower.journals)
        assert [f"{tmp_path / 'b'} can't be listed: Stale file handle."] == notified
        monkeypatch.setattr(os, "scandir", scandir)
        follower.poll()
        assert 4 == ended(follower) and not follower.past


def test_sums_of_a_removed_host_stay(tmp_path: Path) -> None:
    journals.clean(tmp_path / "a" / NAME)
    journals.clean(tmp_path / "b" / NAME)
    with following(tmp_path) as follower:
        shutil.rmtree(tmp_path / "b")
        follower.poll()
        assert 2 == ended(follower)
        assert ["a/" + NAME] == [*follower.journals]


def test_a_folder_of_other_things_is_not_followed(tmp_path: Path) -> None:
    notified: list[str] = []
    journals.clean(tmp_path / "other" / "deep" / NAME)
    journals.clean(tmp_path / ".hidden" / NAME)
    journals.clean(tmp_path / "events-1-2-0" / NAME)
    (tmp_path / "other" / "numbers").mkdir()
    (tmp_path / "other" / "numbers" / "00000001.kvl").write_text("1")
    with following(tmp_path, notified=notified) as follower:
        follower.poll()
        assert {} == follower.journals and [] == notified


def test_a_journal_that_cannot_be_read_does_not_hide_its_host(tmp_path: Path) -> None:
    notified: list[str] = []
    journals.clean(tmp_path / "a" / NAME)
    (tmp_path / "a" / "engine-2").mkdir()
    (tmp_path / "a" / "engine-2" / "00000001.kvl").write_text("1")
    with following(tmp_path, notified=notified) as follower:
        assert ["a/" + NAME] == [*follower.journals]
        assert 1 == len(notified) and "engine-2 is not a kvledger journal" in notified[0]


def test_a_host_out_of_reach_while_the_sidecar_starts_loses_nothing(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    notified: list[str] = []
    with following(tmp_path) as follower:
        follower.save()
    engines[0].serve()
    originals = {name: getattr(os, name) for name in ("stat", "lstat", "scandir", "open")}

    def refusing(name: str) -> Any:
        def call(path: Any, *args: Any, **given: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).is_relative_to(tmp_path / "b" / NAME):
                raise PermissionError(13, "Permission denied", str(path))
            return originals[name](path, *args, **given)

        return call

    with monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(os, name, refusing(name))
        follower = Follower(tmp_path, tmp_path / ".kvledger", notified.append)
        follower.catch_up()
    assert [2] == [engine_audit.closed.requests for engine_audit in follower.audits]
    assert [f"{tmp_path / 'b' / NAME} can't be read; it is tried again."] == notified
    assert 1 == follower.health.unreadable
    follower.save()
    follower.close()

    with following(tmp_path) as follower:
        engines[1].serve()
        follower.poll()
        assert [2, 2] == [engine_audit.closed.requests for engine_audit in follower.audits]
        assert {} == follower.health.lost
