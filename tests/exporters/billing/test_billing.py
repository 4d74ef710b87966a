"""Billable lines count each prompt once and nothing unknown; a changed statement is found."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events, weave

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Finished, Gap, RequestAdded, RequestLabels
from kvledger.exporters.billing import chain, run
from kvledger.exporters.billing.lines import month

NOVEMBER = month("2026-11")
IN_NOVEMBER = NOVEMBER.start + 3600


def journal(folder: Path, *names: str, group: str = "") -> Path:
    """The journal of requests of one prompt of 100 tokens that ended in November, one a name.

    The first one computes its prompt; each other one hits 64 tokens of it.
    """
    cold, hit = "A0+0 s100 o+ s1 o+ F", "A64+0 s36 o+ s1 o+ F"
    words = " ".join(
        f"{letter}.{word}"
        for letter, name in zip("abcd", names, strict=False)
        for word in (cold if name == names[0] else hit).split()
    )
    labels = RequestLabels(group=group) if group else None
    stream = [
        replace(each, request_id=names[each.request], labels=labels)
        if isinstance(each, RequestAdded)
        else each
        for each in weave(dict.fromkeys(range(len(names)), 100), words)
    ]
    return journals.write(folder, stream, wall_seconds=IN_NOVEMBER, configuration={"model": "tiny"})


def paired(folder: Path, name: str, words: str, role: str, **marks: Any) -> Path:
    """The journal of a prefill or decode engine with one request of a prompt of 100 tokens."""
    stream = [
        replace(each, request_id=name, **marks) if isinstance(each, RequestAdded) else each
        for each in events(100, words)
    ]
    return journals.write(
        folder, stream, wall_seconds=IN_NOVEMBER, configuration={"model": "tiny", "kv_role": role}
    )


def prefilled(folder: Path, words: str = "A32+0 s68 o+ F") -> Path:
    return paired(folder / "p", "cmpl-a-0-0a1b2c3d", words, "kv_both", remote_decode=True)


def decoded(folder: Path, words: str = "A0+96 L s4 o+ s1 o+ F") -> Path:
    return paired(folder / "d", "cmpl-a-0-0a1b2c3e", words, "kv_both", transferred=True)


def not_billed(text: str) -> dict[str, int]:
    (first, *_) = rows(text)
    found: dict[str, int] = json.loads(first["x_NotBilled"])
    return found


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def tokens(text: str) -> dict[str, int]:
    return {row["SkuMeter"]: int(row["ConsumedQuantity"]) for row in rows(text)}


def statement(*places: Path, by: str = "", format: str = "focus-csv", after: Path | None = None) -> str:
    return run.statement(places, "2026-11", by, format, after)


def test_tokens_of_a_month_by_source(tmp_path: Path) -> None:
    text = statement(journal(tmp_path / "one", "cmpl-a-0-0a1b2c3d", "cmpl-b-0-0a1b2c3e"))

    assert {"Input tokens, read": 64, "Input tokens, uncached": 136, "Output tokens": 4} == tokens(text)
    (first, *_) = rows(text)
    assert "2026-11-01T00:00:00Z" == first["BillingPeriodStart"]
    assert "2026-12-01T00:00:00Z" == first["BillingPeriodEnd"]
    assert {"TokenDirection": "Input", "TokenCacheAction": "Read"} == json.loads(first["SkuPriceDetails"])
    assert ["one"] == list(json.loads(first["x_Journals"]))
    assert ("2", "0") == (first["x_Requests"], first["x_UnknownRequests"])


def test_a_prompt_of_two_samples_is_billed_once(tmp_path: Path) -> None:
    """The second sample hits what the first one computed."""
    text = statement(journal(tmp_path / "one", "0_cmpl-a-0-0a1b2c3d", "1_cmpl-a-0-0a1b2c3d"))

    assert {"Input tokens, uncached": 100, "Output tokens": 4} == tokens(text)


def test_a_prompt_of_a_prefill_and_a_decode_engine_is_billed_once(tmp_path: Path) -> None:
    """In any order of the journals: the prompt of one engine, the output of the other."""
    places = [prefilled(tmp_path), decoded(tmp_path)]

    for order in (places, places[::-1]):
        text = statement(*order)
        billed = {"Input tokens, read": 32, "Input tokens, uncached": 68, "Output tokens": 2}
        assert billed == tokens(text)
        assert {"prefill-output": 1, "transferred": 96, "recomputed": 4} == not_billed(text)


def test_a_prompt_that_is_computed_after_a_failed_transfer_is_billed_once(tmp_path: Path) -> None:
    places = [prefilled(tmp_path), decoded(tmp_path, "A0+96 L0 A0+0 s100 o+ s1 o+ F")]

    text = statement(*places)

    assert {"Input tokens, read": 32, "Input tokens, uncached": 68, "Output tokens": 2} == tokens(text)
    assert {"prefill-output": 1, "transfer-failed": 100} == not_billed(text)


def test_a_request_that_only_shares_the_id_is_billed_as_a_whole(tmp_path: Path) -> None:
    other = paired(tmp_path / "o", "cmpl-a-0-0a1b2c3f", "A64+0 s36 o+ F", "kv_both")

    text = statement(prefilled(tmp_path), decoded(tmp_path), other)

    assert {"Input tokens, read": 96, "Input tokens, uncached": 104, "Output tokens": 3} == tokens(text)


def test_two_engines_that_share_an_id_without_a_transfer_are_billed_both(tmp_path: Path) -> None:
    words = ("A0+0 s100 o+ F", "A64+0 s36 o+ F")
    places = [paired(tmp_path / w[:3], "cmpl-a-0-0a1b2c3d", w, "kv_both") for w in words]

    text = statement(*places)

    assert {"Input tokens, read": 64, "Input tokens, uncached": 136, "Output tokens": 2} == tokens(text)
    assert {} == not_billed(text)


def test_a_prompt_is_not_billed_without_its_prefill_engine(tmp_path: Path) -> None:
    """The statement over the prefill engine's journal has the prompt, and no output."""
    apart = statement(decoded(tmp_path)), statement(prefilled(tmp_path))

    assert {"Output tokens": 2} == tokens(apart[0])
    assert {"prefilled-elsewhere": 100} == not_billed(apart[0])
    assert {"Input tokens, read": 32, "Input tokens, uncached": 68} == tokens(apart[1])
    assert {"prefill-output": 1} == not_billed(apart[1])


def test_samples_in_several_engines_are_one_prompt(tmp_path: Path) -> None:
    """Data parallel ranks serve the samples of one call."""
    words = ("A0+0 s100 o+ F", "A64+0 s36 o+ F")
    places = [paired(tmp_path / str(n), f"{n}_cmpl-a-0-0a1b2c3d", w, "kv_both") for n, w in enumerate(words)]

    text = statement(*places)

    assert {"Input tokens, uncached": 100, "Output tokens": 2} == tokens(text)
    assert {"another-sample": 100} == not_billed(text)


def test_a_statement_without_later_columns_still_verifies(written: Path) -> None:
    lines = [{k: v for k, v in row.items() if k != "x_NotBilled"} for row in chain.read(written)]
    previous = ""
    for line in lines:
        line["x_PreviousHash"] = previous
        previous = line["x_Hash"] = chain._hash(line)
    written.write_text(json.dumps(lines))
    assert 3 == chain.verify(written).lines

    del lines[1]["x_NotBilled" if "x_NotBilled" in lines[1] else "Tags"]
    written.write_text(json.dumps(lines))
    with pytest.raises(LedgerError, match="does not have its columns"):
        chain.verify(written)


def test_lines_by_group(tmp_path: Path) -> None:
    places = [journal(tmp_path / name, f"cmpl-{name}-0-0a1b2c3d", group=name) for name in ("a", "b")]

    text = statement(*places, by="group", format="json")

    assert {'{"group": "a"}', '{"group": "b"}'} == {row["Tags"] for row in json.loads(text)}


def test_an_unknown_request_is_counted_and_not_billed(tmp_path: Path) -> None:
    """A gap in the events makes the account incomplete."""
    stream = [
        replace(each, request_id="cmpl-a-0-0a1b2c3d") if isinstance(each, RequestAdded) else each
        for each in events(100, "A0+0 s100 o+ s1 o+ F")
    ]
    stream.insert(3, Gap(stream[2].at, 1, "queue full"))
    place = journals.write(tmp_path / "one", stream, wall_seconds=IN_NOVEMBER)

    (row,) = rows(statement(place))

    assert ("0", "0", "1") == (row["ConsumedQuantity"], row["x_Requests"], row["x_UnknownRequests"])


def test_an_open_request_is_left_to_the_next_statement(tmp_path: Path) -> None:
    stream = [each for each in events(200, journals.CLEAN) if type(each) is not Finished]
    place = journals.write(tmp_path / "one", stream, wall_seconds=IN_NOVEMBER, stopped=False)

    with pytest.raises(LedgerError, match=r"No request ended in 2026-11\."):
        statement(place)


def test_another_month_has_no_lines(tmp_path: Path) -> None:
    place = journal(tmp_path / "one", "cmpl-a-0-0a1b2c3d")

    with pytest.raises(LedgerError, match=r"No request ended in 2026-10\."):
        run.statement([place], "2026-10", "", "focus-csv", None)
    with pytest.raises(LedgerError, match=r"'2026-13' is no month; write 2026-11"):
        run.statement([place], "2026-13", "", "focus-csv", None)


def test_december_ends_with_the_year() -> None:
    assert month("2027-01").start == month("2026-12").end


@pytest.fixture
def written(tmp_path: Path) -> Path:
    place = journal(tmp_path / "journal", "cmpl-a-0-0a1b2c3d", "cmpl-b-0-0a1b2c3e")
    path = tmp_path / "november.csv"
    run.write(statement(place), path, None)
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [*lines[:-1]], "has 2 of 3 lines: it was cut off"),
        (lambda lines: [lines[0], *lines[2:]], "Line 1 of .* was line 2"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "Line 1 of .* was line 2"),
        (lambda lines: [each.replace("Tokens", "Token") for each in lines], "Line 1 of .* was changed"),
        (lambda lines: lines[:1], "has no lines"),
    ],
    ids=["truncated", "removed", "moved", "changed", "emptied"],
)
def test_a_changed_statement_is_found(written: Path, change: Any, says: str) -> None:
    lines = written.read_text().splitlines()
    assert 4 == len(lines)
    written.write_text("\n".join(change(lines)) + "\n")

    with pytest.raises(chain.Broken, match=says):
        run.verified(written, None)


def test_a_line_of_another_statement_is_found(written: Path, tmp_path: Path) -> None:
    other = statement(journal(tmp_path / "b", "cmpl-c-0-0a1b2c3d"))
    lines = written.read_text().splitlines()
    lines[2] = other.splitlines()[2]
    written.write_text("\n".join(lines) + "\n")

    with pytest.raises(chain.Broken, match=r"Line 2 of .* does not follow"):
        run.verified(written, None)


def test_statements_are_chained(written: Path, tmp_path: Path) -> None:
    place = journal(tmp_path / "b", "cmpl-c-0-0a1b2c3d")
    next_one = tmp_path / "next.json"

    run.write(statement(place, format="json", after=written), next_one, None)

    assert f"It follows the statement that ends with {chain.head(written)[:16]}" in run.verified(
        next_one, None
    )


def test_a_signed_statement_holds_for_its_key_alone(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    own, other = keys(tmp_path, "own"), keys(tmp_path, "other")
    with pytest.raises(chain.Broken, match="has no signature"):
        run.verified(written, own.with_suffix(".pub"))
    chain.sign(written, own)

    assert f"signed with the key of {own.with_suffix('.pub')}" in run.verified(
        written, own.with_suffix(".pub")
    )
    assert "with a key that --public-key did not name" in run.verified(written, None)
    with pytest.raises(chain.Broken, match=r"signature of .* does not hold"):
        run.verified(written, other.with_suffix(".pub"))
    rows = [{name: row[name] for name in chain.COLUMNS} for row in chain.read(written)]
    rows[0]["ConsumedQuantity"] = "1"
    written.write_text(chain.as_csv(chain.chained(rows)))
    with pytest.raises(chain.Broken, match=r"signature of .* does not hold"):
        run.verified(written, None)


def test_bad_keys_and_files_are_one_sentence(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(LedgerError, match="has no private key in PEM without a password"):
        chain.sign(written, tmp_path / "text")
    with pytest.raises(LedgerError, match=r"none can't be read"):
        chain.sign(written, tmp_path / "none")
    with pytest.raises(LedgerError, match="is no statement"):
        run.verified(tmp_path / "text", None)
    written.with_name(written.name + ".sig").write_text("{}")
    with pytest.raises(LedgerError, match="is no signature of a statement"):
        run.verified(written, None)


def test_the_command_writes_signs_and_verifies(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    place, own = journal(tmp_path / "one", "cmpl-a-0-0a1b2c3d"), keys(tmp_path, "own")
    out = tmp_path / "november.csv"

    def kvledger(*words: object) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "kvledger", "statement", *map(str, words)], capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    assert (0, "") == kvledger(place, "--month", "2026-11", "-o", out, "--key", own)
    code, says = kvledger("--verify", out, "--public-key", own.with_suffix(".pub"))
    assert (0, True) == (code, "2 lines unchanged, signed with the key of" in says)
    out.write_text(out.read_text().replace(",100,Tokens", ",10,Tokens"))
    assert (1, True) == ((found := kvledger("--verify", out))[0], "was changed" in found[1])
    assert (2, True) == ((found := kvledger(place))[0], "needs journals and --month" in found[1])
    assert (2, True) == ((found := kvledger(place, "--month", "x"))[0], "'x' is no month" in found[1])


def keys(folder: Path, name: str) -> Path:
    """A new private key in PEM, with its public key beside it."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    path = folder / f"{name}.pem"
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path
