"""A folder with a folder for each host: which folders are hosts, and which names their engines have."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.journal.test_journal import make_foreign_segments

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.catalogue import facts, find_journals, host_folders
from kvledger.audit.journal.host_folders import engine_name, host_of, journal_name, same_place
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import audit_paths

NAME = "engine-1795484413724-7-2"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Two hosts with journals of one name, whose engines have one process id and rank."""
    for host in ("a", "b"):
        journals.clean(tmp_path / host / NAME)
    return tmp_path


def test_journals_of_all_hosts_are_found_each_once(hosts: Path) -> None:
    journals.clean(hosts / "engine-0")
    expected = [hosts / "engine-0", hosts / "a" / NAME, hosts / "b" / NAME]

    assert expected == find_journals([hosts])
    assert expected == find_journals([hosts, hosts / "b"])
    assert ["", "a", "b"] == [host_of(journal) for journal in find_journals([hosts])]


def test_a_host_s_own_folder_is_a_flat_folder(hosts: Path) -> None:
    [journal] = find_journals([hosts / "a"])

    assert "" == host_of(journal)
    assert "vllm 0.32.0 pid 4000" == audit_paths([hosts / "a"]).engines[0].name


def test_engines_of_two_hosts_have_two_names(hosts: Path) -> None:
    names = ["vllm 0.32.0 pid 4000 in a", "vllm 0.32.0 pid 4000 in b"]

    audit = audit_paths([hosts])
    assert names == [engine.name for engine in audit.engines]
    assert names == [facts(path).engine for path in find_journals([hosts])]
    assert [f"a/{NAME}", f"b/{NAME}"] == [journal_name(engine.path) for engine in audit.engines]


def test_a_finding_names_the_host(hosts: Path) -> None:
    journals.violated(hosts / "b" / "engine-2")

    assert {"vllm 0.32.0 pid 4000 in b"} == {each.engine for each in audit_paths([hosts]).violations}


def test_a_host_s_name_stands_once(tmp_path: Path) -> None:
    """The engine's host name, or KVLEDGER_NAME, may be that of the folder."""
    journals.write(tmp_path / "a" / NAME, [], configuration={"instance": "a"})
    [journal] = find_journals([tmp_path])
    started = replace(journals.STARTED, configuration={"instance": "a"})

    assert "vllm 0.32.0 pid 4000 on a" == engine_name(started, journal)
    other = replace(journals.STARTED, configuration={"instance": "vm"})
    assert "vllm 0.32.0 pid 4000 on vm in a" == engine_name(other, journal)


def test_another_process_knows_the_host(hosts: Path) -> None:
    [journal, _] = find_journals([hosts])

    again = pickle.loads(pickle.dumps(journal))
    assert (journal, "a") == (again, host_of(again))
    assert "a" == host_of(same_place(Path("/copy"), journal))
    assert "" == host_of(journal / "00000001.kvl")


def foreign(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "notes.txt").touch()


def foreign_segments(path: Path) -> None:
    path.mkdir()
    make_foreign_segments(path / "numbers")


def deeper(path: Path) -> None:
    journals.clean(path / "deep" / NAME)


@pytest.mark.parametrize("make", [foreign, foreign_segments, deeper])
def test_a_folder_of_other_things_is_no_host(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "it"
    path.mkdir()
    make(path / "other")

    with pytest.raises(LedgerError) as raised:
        find_journals([path])
    assert f"{path} holds no kvledger journal." == str(raised.value)

    journals.clean(path / NAME)
    assert [path / NAME] == find_journals([path])


@pytest.mark.parametrize("name", [".kvledger-facts", ".old", "events-1-2-0", "worker-1-2-0"])
def test_a_folder_that_is_hidden_or_read_with_others_is_no_host(hosts: Path, name: str) -> None:
    journals.clean(hosts / name / NAME)

    assert [hosts / "a" / NAME, hosts / "b" / NAME] == find_journals([hosts])


def test_a_folder_in_a_journal_is_no_host_s_journal(hosts: Path) -> None:
    journals.clean(hosts / "a" / NAME / "copy")

    assert [hosts / "a" / NAME, hosts / "b" / NAME] == find_journals([hosts])


@pytest.mark.parametrize("host", ["a", "c"])
def test_what_seems_a_journal_beside_a_host_s_journals_is_said(
    hosts: Path, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the host's sums would lack it without a word."""
    (hosts / host).mkdir(exist_ok=True)
    make_foreign_segments(hosts / host / "engine-9")

    assert [hosts / "a" / NAME, hosts / "b" / NAME] == find_journals([hosts])
    assert "engine-9 is not a kvledger journal" in caplog.text


def test_a_host_with_recordings_only_is_listed_for_prune(hosts: Path) -> None:
    journals.clean(hosts / "c" / "events-1-2-0")
    foreign(hosts / "other")

    assert [hosts / name for name in "abc"] == host_folders(hosts)


def test_the_demo_s_folder_is_no_host(tmp_path: Path) -> None:
    journals.clean(tmp_path / "journal" / NAME)
    assert [""] == [host_of(path) for path in journals_at([tmp_path])]

    journals.clean(tmp_path / "b" / NAME)
    assert ["b", "journal"] == [host_of(path) for path in journals_at([tmp_path])]
