"""The partition card: which differences part the KV of two requests, in each place that keeps KV.

For each difference a first request runs to its end. A second one has the same tokens and differs from it in
one thing. A place *parts* them if the second request gets nothing of the first one's KV from where they
differ, and they *share* if it does: then a request runs over KV that was made for another one. A control with
no difference must share, else the cell says nothing; requests with other tokens must not.

The real scheduler, and the real scheduler side and worker side of a connector, are driven on the CPU.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import msgspec

from .. import temporary
from ..traffic.driver import Driver
from ..traffic.engine_setup import EngineSetup
from .connector_classes import Connector
from .scorecard import describe_exception, quiet, versions
from .worker import ObservedEngines

BLOCK = 16
DIFFERS = range(BLOCK, 2 * BLOCK)
"""The positions in which inputs differ that have a place in the prompt."""

PROMPT_TOKENS = 4 * BLOCK + 5
CHILD_SECONDS = 600.0
"""After so long, an engine hangs; a busy machine needs a minute to start one."""
PREFIX_CACHE, EVENTS = "prefix cache", "KV events"
"""Two places; the others are connectors."""

Cell = Literal["parts", "shares", "no control", "not here", "broke"]
"""``not here``: this release, or this place, does not know the difference."""

Arguments = Mapping[str, Any]
"""Further arguments of vLLM's Request."""


class Difference(NamedTuple):
    """What two requests, or their engines, differ in. ``common``: the tokens that they may share."""

    name: str
    requests: Callable[[], tuple[Arguments, Arguments]] = lambda: ({}, {})
    setup: Mapping[str, Any] = {}
    """How both engines are set up."""
    of_second: Mapping[str, Any] = {}
    """How the second request's engine is set up; none: one engine has both requests."""
    common: int = 0
    other_tokens: bool = False


class KeyRow(msgspec.Struct, frozen=True):
    """One difference: its cell in each place, the tokens shared in the first of them, and what broke."""

    difference: str
    cells: dict[str, Cell]
    shared: int
    problem: str = ""


class KeyCard(msgspec.Struct, frozen=True):
    """The partition card of the installed releases."""

    engine: str
    places: list[str]
    rows: list[KeyRow]

    @property
    def verdict(self) -> Literal["clean", "violated", "unknown"]:
        """``violated`` if any cell shares; ``unknown`` if one has no control, or broke."""
        cells = {cell for row in self.rows for cell in row.cells.values()}
        return "violated" if "shares" in cells else "unknown" if cells & {"no control", "broke"} else "clean"


def key_card(connector: Connector | None = None) -> KeyCard:
    """Drive every difference through the prefix cache and its KV events, or through a connector."""
    with quiet():
        rows = [_row(difference, connector) for difference in DIFFERENCES]
        engine = versions()
    return KeyCard(engine, places_of(connector), rows)


def places_of(connector: Connector | None) -> list[str]:
    """The places of a card."""
    return [PREFIX_CACHE, EVENTS] if connector is None else [connector.name]


# --- differences --------------------------------------------------------------------------------------


def _salts() -> tuple[Arguments, Arguments]:
    return {"cache_salt": "one"}, {"cache_salt": "two"}


def _adapters(
    *second: Any, first: Sequence[Any] = ("a", 1, "/adapters/a"), **more: Any
) -> Callable[[], tuple[Arguments, Arguments]]:
    def requests() -> tuple[Arguments, Arguments]:
        from vllm.lora.request import LoRARequest

        return {"lora_request": LoRARequest(*first)}, {"lora_request": LoRARequest(*second, **more)}

    return requests


def _no_adapter() -> tuple[Arguments, Arguments]:
    return {}, _adapters("a", 1, "/adapters/a")()[1]


def _images() -> tuple[Arguments, Arguments]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def image(identity: str) -> Arguments:
        place = PlaceholderRange(offset=DIFFERS.start, length=len(DIFFERS))
        return {"mm_features": [MultiModalFeatureSpec(None, "image", identity, place)]}

    return image("1" * 64), image("2" * 64)  # as vLLM's own identities, which are digests


def _embeddings() -> tuple[Arguments, Arguments]:
    import torch

    first = torch.zeros(PROMPT_TOKENS, 4)
    second = first.clone()
    second[DIFFERS.start : DIFFERS.stop] = 1
    mask = [position not in DIFFERS for position in range(PROMPT_TOKENS)]
    return (
        {"prompt_embeds": first, "prompt_is_token_ids": mask},
        {"prompt_embeds": second, "prompt_is_token_ids": list(mask)},
    )


def _masks() -> tuple[Arguments, Arguments]:
    """In the positions of token 0 the first request has the token, the second one an embedding."""
    import torch

    def mixed(embedded: range) -> Arguments:
        mask = [position not in embedded for position in range(PROMPT_TOKENS)]
        return {"prompt_embeds": torch.ones(PROMPT_TOKENS, 4), "prompt_is_token_ids": mask}

    return mixed(range(0)), mixed(DIFFERS)


LORA: Mapping[str, Any] = {"loras": 2}
DIFFERENCES = (
    Difference("other tokens", other_tokens=True),
    Difference("cache salt", _salts),
    Difference("LoRA adapter, or none", _no_adapter, LORA),
    Difference("LoRA adapter's name", _adapters("b", 1, "/adapters/a"), LORA),
    Difference("LoRA adapter's path, name and id kept", _adapters("a", 1, "/adapters/b"), LORA),
    Difference("LoRA adapter, loaded in place", _adapters("a", 1, "/adapters/a", load_inplace=True), LORA),
    Difference("multimodal input's identity", _images, {"encoder_tokens": 64}, common=BLOCK),
    Difference("prompt embeddings beside tokens", _embeddings, common=BLOCK),
    Difference("mask of prompt embeddings", _masks, common=BLOCK),
    Difference("model", of_second={"model": "other"}),
    Difference("model's revision", of_second={"revision": "other"}),
    Difference("dtype of the KV cache", of_second={"cache_dtype": "bfloat16"}),
    Difference("quantisation of the KV cache", of_second={"cache_dtype": "fp8"}),
    Difference("block size", of_second={"block_size": 2 * BLOCK}),
)


# --- what routers are told -------------------------------------------------------------------------------


class Told(NamedTuple):
    """Two requests, the prompt of each, and the KV events of the engine that has served the first one."""

    requests: tuple[Arguments, Arguments]
    prompts: tuple[list[int], list[int]]
    events: list[Any]


def told(difference: Difference) -> Told:
    """What an engine publishes of the first request of a difference.

    Each call has tokens of its own. Raises ImportError or TypeError where the release does not know the
    difference.
    """
    salt = uuid4().hex
    requests = difference.requests()
    driver = Driver(EngineSetup(**_setup(difference)))
    events = _publish(driver)
    _run(driver, "first", requests[0], salt=salt)
    return Told(requests, (_prompt(salt), _prompt(salt, other_tokens=difference.other_tokens)), events)


# --- cells ------------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """What the second request found, and the KV events of both; no events in a connector's store."""

    tokens: int
    events: tuple[list[Any], list[Any]] = ([], [])


def _row(difference: Difference, connector: Connector | None) -> KeyRow:
    """The cells of one difference."""
    places = places_of(connector)

    def all_of(cell: Cell, problem: str = "") -> KeyRow:
        return KeyRow(difference.name, dict.fromkeys(places, cell), 0, problem)

    if connector is None and difference.of_second:
        return all_of("not here")
    try:
        first, second = difference.requests()
    except (ImportError, TypeError):  # this release does not have it
        return all_of("not here")
    if not {*first, *second} <= _known_arguments():
        return all_of("not here")
    try:
        control = _ask(difference, connector, first, first, control=True)
        asked = _ask(difference, connector, first, second, control=False)
    except _Broke as error:
        return all_of("broke", str(error))
    except Exception as error:  # of the scheduler or of the connector
        return all_of("broke", describe_exception(error))
    if control.tokens <= difference.common:
        return all_of("no control")
    shared = max(0, asked.tokens - difference.common)
    row = KeyRow(difference.name, {places[0]: "shares" if shared else "parts"}, shared)
    if connector is None:
        row.cells[EVENTS] = "parts" if _told(asked.events[0]) != _told(asked.events[1]) else "shares"
        if shared:
            row.cells[EVENTS] = "shares"  # the second request's blocks are the first one's
    return row


def _known_arguments() -> set[str]:
    """The arguments that this release's Request takes."""
    from vllm.v1.request import Request

    return set(inspect.signature(Request).parameters)


def _ask(
    difference: Difference, connector: Connector | None, first: Arguments, second: Arguments, *, control: bool
) -> _Asked:
    """Run the first request and then the second one; a ``control`` has no difference."""
    other_tokens = difference.other_tokens and not control
    if connector is None:
        driver = Driver(EngineSetup(**_setup(difference)))
        of_first = _publish(driver)
        _run(driver, "first", first)
        of_second = _publish(driver)
        tokens = _run(driver, "second", second, other_tokens=other_tokens)
        return _Asked(tokens, (of_first, of_second))
    salt = uuid4().hex
    with temporary.folder("kvledger-keys-") as folder:
        setup = _setup(difference) | connector.setup(folder)
        if difference.of_second:
            setup_of_second = setup if control else {**setup, **difference.of_second}
            _in_child(setup, "first", salt)
            return _Asked(_in_child(setup_of_second, "second", salt))
        engines = ObservedEngines(salt)
        try:
            driver = engines.start(**setup)
            _run(driver, "first", first, salt=salt)
            driver.reset_prefix_cache()
            return _Asked(_run(driver, "second", second, other_tokens=other_tokens, salt=salt))
        finally:
            engines.stop()


def _setup(difference: Difference) -> dict[str, Any]:
    """How the engines of a difference are set up."""
    return {"block_size": BLOCK, "blocks": 64, "max_batched_tokens": 512, **difference.setup}


class _Broke(Exception):
    """An engine's own process failed; the message says how."""


def _in_child(setup: Arguments, name: str, salt: str) -> int:
    """What a request finds on an engine in a process of its own: a store in memory ends with its engine.

    Raises :class:`_Broke`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.first_engine"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(setup, name, salt, writer), daemon=True)
    try:
        process.start()
        writer.close()
        if not reader.poll(CHILD_SECONDS):
            raise _Broke(f"an engine took longer than {CHILD_SECONDS:.0f} s")
        result = reader.recv()
    except (EOFError, OSError):
        raise _Broke("an engine's process ended") from None
    finally:
        if process.pid:
            process.kill()
            process.join()
    if isinstance(result, str):
        raise _Broke(result)
    return int(result)


def _alone(setup: Arguments, name: str, salt: str, answer: Any) -> None:
    """Run one request on an engine of its own; the answer is its tokens, or what failed."""
    engines = ObservedEngines(salt)
    try:
        tokens = _run(engines.start(**setup), name, {}, salt=salt)
        engines.stop()
        answer.send(tokens)
    except Exception as error:
        answer.send(describe_exception(error))


def _run(driver: Any, name: str, arguments: Arguments, *, other_tokens: bool = False, salt: str = "") -> int:
    """Run a request to its end; the tokens that its first admission did not compute."""
    prompt = _prompt(salt, other_tokens=other_tokens)
    found: list[int] = []
    schedule = driver.schedule

    def noting() -> Any:
        scheduled = schedule()
        found.extend(new.num_computed_tokens for new in scheduled.scheduled_new_reqs if new.req_id == name)
        return scheduled

    driver.schedule = noting
    driver.add(name, prompt, 1, of_request=arguments)
    driver.run()
    driver.schedule = schedule
    return int(found[0]) if found else 0


def _prompt(salt: str, *, other_tokens: bool = False) -> list[int]:
    own = int(salt[:6] or "0", 16) % 10_000 + 100
    return [0 if place in DIFFERS else own + place + 200 * other_tokens for place in range(PROMPT_TOKENS)]


class _Publisher:
    """Takes the place of vLLM's publisher of KV events, and keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        """The KV events, in order."""

    def publish(self, batch: Any) -> None:
        """Keep one batch."""
        self.events += batch.events

    def get_publisher_config(self) -> None:
        """Nothing is configured."""

    def shutdown(self) -> None:
        """Nothing to close."""


def _publish(driver: Any) -> list[Any]:
    """From now on, the engine's KV events go into the list that is returned."""
    manager, publisher = driver.scheduler.kv_cache_manager, _Publisher()
    manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
    driver.scheduler.kv_event_publisher = publisher
    return publisher.events


_HASHES = {"block_hashes", "parent_block_hash", "session_id"}


def _told(events: Sequence[Any]) -> list[dict[str, Any]]:
    """What KV events tell of blocks beside their hashes."""
    return [
        {name: repr(getattr(event, name)) for name in event.__struct_fields__ if name not in _HASHES}
        for event in events
        if type(event).__name__ == "BlockStored"
    ]
