"""The check that a request reads no KV of another cache salt, LoRA adapter or multimodal input.

Its subjects come from :mod:`kvledger.audit.ledger.blocks`, which compares the isolation classes of requests
with those of the KV that they hit or load.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.blocks.entries import ForeignHit, ForeignLoad
from ..ledger.blocks.isolation import ADAPTER, INPUT, SALT
from ..ledger.entries import Entry
from .kinds import RESET_CACHE
from .registry import (
    LMCACHE_2880,
    LMCACHE_2961,
    VLLM_30931,
    VLLM_44250,
    VLLM_44701,
    VLLM_56643,
    Witness,
    invariant,
)

_OTHER = {
    SALT: "another cache salt",
    ADAPTER: "another LoRA adapter",
    INPUT: "other multimodal inputs",
}
"""What the request that wrote KV and the request that reads it do not share."""


@invariant(
    "blocks/isolation",
    stop_now=RESET_CACHE,
    tokens="tokens",
    on=(ForeignHit, ForeignLoad),
    message="Request {read_by} hit cached block {block}, which request {written_by} wrote with {other}. The "
    "two requests must not share KV.",
    references=(VLLM_30931, VLLM_44701, VLLM_44250, VLLM_56643, LMCACHE_2880, LMCACHE_2961),
    near_misses=(
        "a hit on blocks before the first multimodal input that differs",
        "a request that was preempted and hits the blocks that it wrote itself",
        "blocks that were cached before the journal began, whose isolation classes are not known",
        "a key of the connector's store for which requests of several classes have saved KV",
    ),
)
def isolation(entry: Entry) -> Iterator[Witness]:
    """A request reads only KV that was written under its own isolation classes.

    These are the class of its cache salt, the class of its LoRA adapter (name and path), and the classes
    and positions of the multimodal inputs that begin before the end of the block. Violated when the request
    hits a cached block whose classes differ: it reads KV of other inputs or of another adapter, or of a
    client from whom a cache salt should keep it apart. Also violated when a connector promises external
    tokens under a key of its store for which only requests of other classes have saved KV.
    """
    subject = entry.subject
    assert isinstance(subject, ForeignHit | ForeignLoad)
    differs, other = ", ".join(subject.differs), " and ".join(_OTHER[kind] for kind in subject.differs)
    if isinstance(subject, ForeignHit):
        several = (
            "Request {read_by} hit {count} cached blocks, the first of them block {block}, which request "
        )
        several += "{written_by} wrote with {other}. The two requests must not share KV."
        yield Witness(
            several if len(subject.blocks) > 1 else None,
            subject.story,
            read_by=subject.holder.request_id,
            written_by=subject.writer,
            differs=differs,
            other=other,
            pool=subject.pool,
            block=subject.blocks[0],
            blocks=subject.blocks,
            count=len(subject.blocks),
            tokens=subject.tokens,
        )
        return
    yield Witness(
        "Request {request} was promised {tokens} external tokens from position {start} up, under keys for "
        "which request {written_by} saved KV with {other}. The two requests must not share KV.",
        written_by=subject.writer,
        differs=differs,
        other=other,
        tokens=subject.tokens,
        start=subject.start,
    )
