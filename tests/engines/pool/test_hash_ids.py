"""Hash ids: numbers that stand for block hashes."""

import subprocess
import sys

import pytest

from kvledger.audit.engines.pool.hash_ids import hash_ids

SAY = "print(hash_ids()(b'a'))"


def test_equal_hashes_have_one_id_and_other_hashes_another() -> None:
    name = hash_ids()

    assert name(b"a") == name(b"a") != name(b"b")


def test_an_id_does_not_reveal_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert hash_ids()(b"a") != hash_ids()(b"a") != hash(b"a")


def test_the_id_of_bytes_is_their_python_hash_where_that_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = [sys.executable, "-c", "from kvledger.audit.engines.pool.hash_ids import hash_ids\n" + SAY]

    assert hash is hash_ids()
    assert subprocess.check_output(told) != subprocess.check_output(told)


def test_no_hash_has_the_id_minus_one() -> None:
    assert -1 not in [hash_ids()(b"%d" % n) for n in range(1000)]
