"""``blocks/isolation`` on the real scheduler: the same run with and without a fault in the block hashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.audit.checks.watched import Watched
from tests.engines.observed import audited, findings, observe
from tests.scenarios import driving
from tests.scenarios.driving import Attach, Driver, lora

from kvledger.audit.engines import choose, host_version
from kvledger.audit.events import EngineStarted, RequestAdded
from kvledger.audit.journal.recorder import MemoryRecorder

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

PREFIX = 64
"""Tokens that both requests of a test share."""


@pytest.fixture
def watched() -> Watched:
    return Watched()


def image(content: str, at: int, tokens: int = 8) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    position = PlaceholderRange(offset=at, length=tokens)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=content, mm_position=position)


def images(*features: Any) -> dict[str, Any]:
    return {"mm_features": list(features)}


def unhashed(monkeypatch: pytest.MonkeyPatch, **hidden: Any) -> None:
    """Inject a fault: block hashes are computed as if requests had these values."""
    from vllm.v1.core import kv_cache_utils

    keys = kv_cache_utils.generate_block_hash_extra_keys

    def without(request: Any, *positions: int) -> Any:
        return keys(SimpleNamespace(**{**vars(request), **hidden}), *positions)

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", without)


def start(watched: Watched, **setup: Any) -> Driver:
    driver = watched.start(**setup)
    scheduler = driver.scheduler
    scheduler.max_num_encoder_input_tokens = 1 << 16
    scheduler.encoder_cache_manager = type(scheduler.encoder_cache_manager)(cache_size=1 << 16)
    return driver


def run_two(watched: Watched, first: Mapping[str, Any], second: Mapping[str, Any], **setup: Any) -> None:
    """Run ``first`` to its end, then ``second``, which has the same first ``PREFIX`` tokens."""
    driver = start(watched, **setup)
    for name, of_request in (("first", first), ("second", second)):
        driver.add(name, 100, 3, shares=("family", PREFIX), of_request=of_request)
        driver.run()


DIFFERENT: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "salt": (
        lambda: {"cache_salt": "alice"},
        lambda: {"cache_salt": "bob"},
        {"cache_salt": None},
        "another cache salt",
    ),
    "salt and none": (lambda: {"cache_salt": "alice"}, dict, {"cache_salt": None}, "another cache salt"),
    "none and salt": (dict, lambda: {"cache_salt": "alice"}, {"cache_salt": None}, "another cache salt"),
    "adapter": (
        lambda: lora("sql", 1),
        lambda: lora("law", 2),
        {"lora_request": None},
        "another LoRA adapter",
    ),
    "adapter and none": (lambda: lora("sql", 1), dict, {"lora_request": None}, "another LoRA adapter"),
    "image": (
        lambda: images(image("cat", 20)),
        lambda: images(image("dog", 20)),
        {"mm_features": []},
        "other multimodal inputs",
    ),
    "image and text": (
        lambda: images(image("cat", 20)),
        dict,
        {"mm_features": []},
        "other multimodal inputs",
    ),
}
"""What two requests don't share: both, the fault that hides it from the hashes, and the finding's words."""


@violates("blocks/isolation")
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("groups", [("full",), ("full", "sliding")], ids=["one group", "two groups"])
def test_a_hit_on_kv_of_another_class_is_found(watched, monkeypatch, case, groups):
    first, second, fault, words = DIFFERENT[case]
    unhashed(monkeypatch, **fault)
    run_two(watched, first(), second(), groups=groups)

    finding = watched.finding("blocks/isolation")

    assert finding.request == "second"
    assert f"which request first wrote with {words}. The two requests must not share KV" in finding.message
    assert finding.figures["written_by"] == "first"


@near_miss("blocks/isolation")
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("groups", [("full",), ("full", "sliding")], ids=["one group", "two groups"])
def test_the_same_run_with_sound_hashes_is_clean(watched, case, groups):
    first, second, _, _ = DIFFERENT[case]
    run_two(watched, first(), second(), groups=groups)

    assert [] == watched.violation_ids()


@near_miss("blocks/isolation")
@pytest.mark.parametrize(
    "of_request",
    [
        dict,
        lambda: {"cache_salt": "alice"},
        lambda: lora("sql", 1),
        lambda: images(image("cat", 20), image("dog", 60)),
        lambda: {"cache_salt": "alice", **lora("sql", 1), **images(image("cat", 20))},
    ],
    ids=["plain", "salt", "adapter", "images", "all"],
)
def test_hits_on_kv_of_the_same_class_are_clean(watched, of_request):
    run_two(watched, of_request(), of_request())

    hits = [account.lives[0].local for account in watched.audits[0].ledger.accounts()]
    assert hits == [0, PREFIX]
    assert [] == watched.violation_ids()


@near_miss("blocks/isolation")
def test_hits_before_the_first_input_that_differs_are_clean(watched):
    same = image("cat", 20)
    run_two(watched, images(same, image("dog", 70)), images(same, image("bird", 80)))

    hits = [account.lives[0].local for account in watched.audits[0].ledger.accounts()]
    assert hits == [0, PREFIX]
    assert [] == watched.violation_ids()


@near_miss("blocks/isolation")
def test_a_preempted_request_hits_its_own_kv(watched):
    driver = start(watched)
    driver.add("r", 100, 8, of_request={"cache_salt": "alice", **images(image("cat", 20))})
    for _ in range(3):
        driver.step()
    driver.preempt("r")
    driver.run()

    assert [] == watched.violation_ids()


# --- the connector's store ----------------------------------------------------------------------------------

STORE = {"connector": "KeyedConnector", "connector_module": "tests.scenarios.keyed_connector"}


def run_with_store(watched: Watched, *requests: dict[str, Any], salted: bool) -> list[int]:
    """Run the requests one after another with an empty local cache; return their external tokens.

    All have the same first ``PREFIX`` tokens, and their prompts are saved.
    """
    driver = start(watched, **STORE)
    driver.connector.salted = salted
    external = []
    for place, of_request in enumerate(requests):
        request = driver.add(f"r{place}", 100, 3, shares=("family", PREFIX), of_request=of_request)
        driver.connector.save(request)
        driver.run()
        driver.reset_prefix_cache()
        account = watched.audits[0].ledger.account(f"r{place}")
        assert account is not None
        external.append(account.promised)
    return external


@violates("blocks/isolation")
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda: {"cache_salt": "bob"}, "another cache salt"),
        (dict, "another cache salt"),
        (lambda: {"cache_salt": "alice", **lora("sql", 1)}, "another LoRA adapter"),
    ],
    ids=["another salt", "no salt", "another adapter"],
)
def test_a_promise_of_kv_that_was_saved_under_another_class_is_found(watched, second, words):
    assert [0, 64] == run_with_store(watched, {"cache_salt": "alice"}, second(), salted=False)

    finding = watched.finding("blocks/isolation")

    assert "r1" == finding.request
    assert f"for which request r0 saved KV with {words}." in finding.message
    assert {"tokens": 64, "start": 0, "written_by": "r0"}.items() <= finding.figures.items()


@near_miss("blocks/isolation")
@pytest.mark.parametrize("salted", [True, False])
def test_promises_of_kv_of_the_same_class_are_clean(watched, salted):
    classes = [{"cache_salt": "alice"}, {"cache_salt": "alice"}]
    assert [0, 64] == run_with_store(watched, *classes, salted=salted)

    assert [] == watched.violation_ids()


@near_miss("blocks/isolation")
def test_a_store_that_keeps_salts_apart_is_clean(watched):
    classes = [{"cache_salt": "alice"}, {"cache_salt": "bob"}, {}, {"cache_salt": "bob"}]
    assert [0, 0, 0, 64] == run_with_store(watched, *classes, salted=True)

    assert [] == watched.violation_ids()


@near_miss("blocks/isolation")
def test_a_key_that_its_own_class_has_saved_too_proves_nothing(watched):
    """The KV may be that of either request: both were scheduled before the store had it."""
    driver = start(watched, **STORE)
    driver.connector.salted = False
    for name, salt in (("a", "alice"), ("b", "bob")):
        of_request = {"cache_salt": salt}
        driver.connector.save(driver.add(name, 100, 3, shares=("family", PREFIX), of_request=of_request))
    driver.run()
    driver.reset_prefix_cache()
    driver.add("c", 100, 3, shares=("family", PREFIX), of_request={"cache_salt": "bob"})
    driver.run()

    assert [] == watched.violation_ids()


# --- what is recorded ---------------------------------------------------------------------------------------

SECRETS = {"cache_salt": "salt-of-alice"}


def one_request(attach: Attach) -> Driver:
    driver = driving.start(attach)
    driver.add("r", 40, 2, of_request={**SECRETS, **lora("sql-adapter", 1), **images(image("cat", 90))})
    return driver


def test_no_salt_path_or_content_hash_is_recorded():
    _, events = observe(one_request, level="blocks")

    recorded = msgspec.msgpack.encode(events)
    added = next(event for event in events if isinstance(event, RequestAdded))
    assert not any(word in recorded for word in (b"alice", b"/adapters", b"cat"))
    assert 1 == recorded.count(b"sql")  # the label of the request; its classes are hashes
    assert added.labels is not None and "sql-adapter" == added.labels.lora
    assert added.isolation is not None
    assert 3 == len({*added.isolation[:3]} - {0})
    assert [90] == added.isolation[3:]


def test_level_tokens_records_no_classes():
    _, events = observe(one_request)

    assert [None] == [event.isolation for event in events if isinstance(event, RequestAdded)]


@violates("blocks/isolation")
def test_a_reader_that_begins_at_a_later_segment_knows_the_classes_of_open_requests(monkeypatch):
    unhashed(monkeypatch, cache_salt=None)
    driver, sink = Driver(), MemoryRecorder()
    observer = choose(driver.scheduler)(driver.scheduler, sink, version=host_version(), level="blocks")
    observer.start()
    driver.add("first", 100, 30, of_request={"cache_salt": "alice"}, shares=("family", PREFIX))
    driver.scheduler.max_num_scheduled_tokens = 32
    driver.step()
    observer.begin_segment()
    for _ in range(4):
        driver.step()
    driver.add("second", 100, 3, of_request={"cache_salt": "bob"}, shares=("family", PREFIX))
    driver.run()
    observer.stop("detached")
    events = sink.take()
    later = [place for place, event in enumerate(events) if isinstance(event, EngineStarted)][-1]

    assert ("blocks/isolation", "second") in findings(audited(events[later:]))


@near_miss("blocks/isolation")
def test_a_session_has_the_inputs_of_its_later_chunks(watched):
    """A request with the session's whole text and the same image hits the blocks of both chunks."""
    driver = start(watched)
    session = driver.add("session", 64, 2, resumable=True)
    driver.run()
    driver.add(
        "session", driver.prompt("chunk", 64, None), 2, resumable=True, of_request=images(image("cat", 4))
    )
    driver.run()
    driver.add("r", list(session.all_token_ids), 2, of_request=images(*session.mm_features))
    driver.run()

    hit = next(account for account in watched.audits[0].ledger.accounts() if account.request_id == "r")
    assert hit.lives[0].local > 64
    assert [] == watched.violation_ids()
