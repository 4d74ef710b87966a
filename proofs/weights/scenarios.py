"""The scenarios: what a caller does with an engine whose weights change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.engines.content_models import write_adapter

from .engine import BLOCK, WAYS
from .subject import ADAPTER, Subject, text

A, B = text(1, 140), text(2, 140)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LAST = "model.layers.1."


def no_reset(subject: Subject, way: str = "reload_weights", **how: Any) -> None:
    """A prompt before and after a change."""
    subject.serve(A, **how)
    subject.update(1, way)
    subject.serve(A, B, **how)


def with_reset(subject: Subject, **how: bool) -> None:
    """A prompt before and after a change, with a reset of the prefix cache."""
    subject.serve(A)
    subject.update()
    subject.reset(**how)
    subject.serve(A, B)


def unchanged(subject: Subject) -> None:
    """A connector loads what it saved, and no weights change."""
    subject.serve(A)
    subject.reset()
    subject.serve(A, B)


def only(subject: Subject, changed: Callable[[str], bool]) -> None:
    """Only some tensors change."""
    subject.serve(A)
    subject.update(1, only=changed)
    subject.serve(A, B)


def embedded(subject: Subject) -> None:
    """Prompts are given as embeddings, whose weights stay the same."""
    subject.serve(A, embedded=True)
    subject.update(1, only=lambda name: name.startswith("model.layers."))
    subject.serve(A, embedded=True)
    subject.serve(B, embedded=True)
    subject.reset()
    subject.serve(A, embedded=True)


def harmless(subject: Subject) -> None:
    """A function of the caller runs on the model and changes nothing."""
    subject.serve(A)
    subject.llm.apply_model(lambda model: None)
    subject.serve(A, B)


def label_only(subject: Subject) -> None:
    """The label changes and the weights do not."""
    subject.serve(A)
    subject.llm.update_weight_version("another")
    subject.serve(A, B)


def equal(subject: Subject, way: str = "reload_weights") -> None:
    """The same weights are loaded again."""
    subject.serve(A)
    subject.update(0, way)
    subject.serve(A, B)


def and_back(subject: Subject) -> None:
    """The weights change, and the old ones come back."""
    subject.serve(A)
    subject.update(1)
    subject.serve(B)
    subject.update(0)
    subject.serve(A, B)


def while_running(subject: Subject, *, pause: bool = False, clear: bool = False, **reset: bool) -> None:
    """The weights change while a request runs; later requests share its prompt and its outputs."""
    subject.add(A, tokens=40)
    subject.step(6)
    if pause:
        subject.core.pause_scheduler("keep", clear)
    subject.update()
    if pause:
        subject.core.resume_scheduler()
    if reset:
        subject.reset(**reset)
    subject.run()
    first = next(iter(subject.served.values()))
    subject.serve(A, first.prompt + first.tokens)


def refused(subject: Subject) -> None:
    """A plain reset is refused while a request runs."""
    while_running(subject, reset_running_requests=False)


def preempted(subject: Subject) -> None:
    """A request is preempted, the weights change, and it resumes over its own older blocks."""
    subject.add(A, tokens=60)
    subject.add(B, tokens=60)
    while (
        not subject.core.scheduler.waiting
        or subject.core.scheduler.waiting.peek_request().num_preemptions == 0
    ):
        subject.step()
    subject.update()
    subject.run()


def chunked(subject: Subject) -> None:
    """The weights change between two chunks of a prompt; others hit its blocks."""
    subject.add(text(3, 250))
    subject.step()
    subject.update()
    subject.run()
    subject.serve(text(3, 250), text(3, 70))


def new_parent(subject: Subject) -> None:
    """A block of the current version whose parent was older is hit below a newer copy of its parent.

    The first request holds 20 tokens of a block when the weights change. The second computes the whole block
    first, so its copy is found from then on; the block after it is the first request's.
    """
    begin = text(4, 20)
    subject.add(begin, tokens=60, allowed_token_ids=[7])
    subject.step()
    subject.update()
    subject.serve(begin + [7] * 12 + [9])
    subject.serve(begin + [7] * 48)


def external(subject: Subject) -> None:
    """The connector keeps its files through a reset that returns True."""
    with_reset(subject, reset_connector=True)


def prefill(folder: Path, options: dict[str, Any], seed: int) -> None:
    """Another engine computes the prompt with the weights of a seed, and fills the store."""
    subject = Subject(folder, **options)
    if seed:
        subject.update(seed)
    subject.serve(A, tokens=1)
    subject.live.engine_core.shutdown()


def decode(subject: Subject, *, updated: bool) -> None:
    """This engine loads what the other one saved, with the parameters of a router."""
    if updated:
        subject.update()
    subject.serve(A, extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    subject.serve(B)


def _lora(subject: Subject, seed: int, *, in_place: bool) -> Any:
    """The adapter's request, after its folder got the content of a seed."""
    from vllm.lora.request import LoRARequest

    subject.adapter = subject.folder / f"{ADAPTER}-{seed}"
    if not subject.adapter.exists():
        write_adapter(subject.adapter, seed)
    path = subject.folder / ADAPTER
    shutil.copytree(subject.adapter, path, dirs_exist_ok=True)
    return LoRARequest(ADAPTER, 1, str(path), load_inplace=in_place)


def adapter(subject: Subject, *, in_place: bool, added: bool) -> None:
    """An adapter of one name gets another content; requests without it are not concerned.

    Without ``added`` the first content is loaded by the request that needs it, and by no call of its own.
    """
    first = _lora(subject, 1, in_place=False)
    if added:
        subject.live.add_lora(first)
    subject.serve(A, lora_request=first)
    subject.serve(B)
    second = _lora(subject, 2, in_place=in_place)
    if not in_place:
        subject.live.remove_lora(1)
    subject.live.add_lora(second)
    subject.serve(A, lora_request=_lora(subject, 2, in_place=False))
    subject.serve(B)


def sleep(subject: Subject, level: int) -> None:
    """The engine sleeps, and has other weights when it wakes up."""
    subject.serve(A)
    subject.llm.sleep(level)
    subject.update()
    subject.llm.wake_up()
    subject.serve(A, B)


def chunks_of_an_update(subject: Subject) -> None:
    """An update comes in two chunks, and a request runs between them."""
    subject.serve(A)
    subject.llm.start_weight_update()
    subject.update(1, "one chunk", only=lambda name: name.startswith("model.layers.0."))
    subject.serve(A)
    subject.update(1, "one chunk")
    subject.llm.finish_weight_update("1")
    subject.serve(A, B)


@dataclass(frozen=True)
class Scenario:
    """What happens, and on which engine."""

    run: Callable[[Subject], None]
    options: dict[str, Any] = field(default_factory=dict)
    level: str = "blocks"
    unseen: bool = False
    """Nothing can see the change at this level."""
    before: Callable[[Path], None] | None = None
    """What another engine does before this one starts."""


SMALL = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 512, "max_model_len": 320}
LORA = {"enable_lora": True, "max_lora_rank": 8}
TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
TRANSFER = {"weight_transfer_config": {"backend": "folder"}}


def _connected(connector: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_role": "kv_both"} | connector, "max_num_batched_tokens": 512}


def _storing(store: Path) -> dict[str, Any]:
    """The options of an engine that saves KV in a folder."""
    extra = {"shared_storage_path": str(store)}
    return _connected({"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra})


def scenarios(folder: Path) -> Iterator[tuple[str, Scenario]]:
    """All of them by name; ``folder`` is the store of the connector."""
    for way in [each for each in WAYS if each != "one chunk"]:
        unseen = way == "own writes, undeclared"
        yield f"no reset, {way}", Scenario(partial(no_reset, way=way), TRANSFER, unseen=unseen)
    for way in ("own writes in apply_model", "own writes, undeclared"):
        again = Scenario(partial(no_reset, way=way), level="content")
        yield f"no reset, {way}, level content", again
    yield "apply_model that changes nothing", Scenario(harmless)
    yield "apply_model that changes nothing, level content", Scenario(harmless, level="content")
    yield "equal weights, level content", Scenario(equal, level="content")
    loaded = partial(equal, way="model.load_weights")
    yield "equal weights by model.load_weights, level content", Scenario(loaded, level="content")
    yield "label only", Scenario(label_only)
    yield "reset", Scenario(with_reset)
    yield "only lm_head", Scenario(partial(only, changed=lambda name: name == "lm_head.weight"))
    yield "only the last layer's mlp", Scenario(partial(only, changed=lambda name: f"{LAST}mlp" in name))
    yield (
        "only the last layer's v",
        Scenario(partial(only, changed=lambda name: f"{LAST}self_attn.v" in name)),
    )
    yield "equal weights", Scenario(equal)
    yield "older weights come back", Scenario(and_back)
    yield "running, no reset", Scenario(while_running)
    yield "running, reset refused", Scenario(refused)
    yield "running, reset(running)", Scenario(partial(while_running, reset_running_requests=True))
    yield "pause keep, cache kept", Scenario(partial(while_running, pause=True))
    yield "pause keep, cache cleared", Scenario(partial(while_running, pause=True, clear=True))
    yield "preempted, then resumed", Scenario(preempted, SMALL)
    yield "chunked prefill over the change", Scenario(chunked)
    yield "newer copy of an older parent", Scenario(new_parent)
    yield "external hits after a reset", Scenario(external, _storing(folder / "one"))
    if find_spec("lmcache") is not None:
        extra = {"lmcache.chunk_size": BLOCK, "lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 0.1}
        lmcache = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
        lmcache["kv_connector_module_path"] = "kvledger.audit.conformance.cpu_lmcache"
        yield "external hits after a reset, LMCache", Scenario(with_reset, _connected(lmcache))
        yield "external hits without a change, LMCache", Scenario(unchanged, _connected(lmcache))
    for updated in (True, False):
        options = _storing(folder / f"pair-{updated}")
        filled = partial(prefill, options=options, seed=int(not updated))
        of_decode = partial(decode, updated=updated)
        name = f"prefill and decode, only {'decode' if updated else 'prefill'} updated"
        yield name, Scenario(of_decode, options, before=filled)
    for added in (True, False):
        by = "added" if added else "loaded by a request"
        in_place = partial(adapter, in_place=True, added=added)
        replaced = partial(adapter, in_place=False, added=added)
        yield f"LoRA {by}, then in place", Scenario(in_place, LORA)
        yield f"LoRA {by}, then removed and added", Scenario(replaced, LORA)
    for level in (0, 1, 2):
        yield f"sleep level {level}", Scenario(partial(sleep, level=level))
    yield "update in chunks", Scenario(chunks_of_an_update, TRANSFER)
    yield "n = 3", Scenario(partial(no_reset, n=3, temperature=0.8))
    yield "drafts (ngram)", Scenario(while_running, {"speculative_config": NGRAM})
    yield "prompts as embeddings", Scenario(embedded, {"enable_prompt_embeds": True})
    yield "asynchronous scheduling", Scenario(while_running, {"async_scheduling": True})
    yield "two workers (TP 2)", Scenario(no_reset, TWO_WORKERS)
    for how in ("in place", "removed and added"):
        reload = partial(adapter, in_place=how == "in place", added=False)
        yield (
            f"two workers (TP 2), LoRA loaded by a request, then {how}",
            Scenario(reload, LORA | TWO_WORKERS),
        )
