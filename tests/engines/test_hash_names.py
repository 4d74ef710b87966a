"""Numbers that stand for block hashes."""

from kvledger.audit.engines.hash_names import namer


def test_a_hash_has_one_number_and_another_hash_another() -> None:
    name = namer()

    assert name(b"a") == name(b"a") != name(b"b")
    assert name((7, (1, 2))) == name((7, (1, 2))) != name((7, (1, 3)))  # as vLLM 0.9 has them


def test_a_number_does_not_tell_of_the_hash() -> None:
    assert namer()(b"a") != namer()(b"a")


def test_numbers_are_no_word_for_nobody() -> None:
    name = namer()

    assert all(0 <= name(b"%d" % n) < 2**63 for n in range(1000))
