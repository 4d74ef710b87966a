"""The words that kvledger prints and its pages use, as one table.

Here: each term with its meaning and an example, the lookup that ``kvledger explain TERM`` uses, and the
page ``docs/reference/glossary.md``. Not here: invariants, whose definitions stand beside their checks
(``checks/registry.py``), and the causes of single differences (``causes.py``).
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

WIDTH = 80


class Term(NamedTuple):
    """One term. ``aliases`` are other spellings that :func:`term` accepts."""

    name: str
    meaning: str
    example: str
    aliases: tuple[str, ...] = ()


SECTIONS: dict[str, tuple[Term, ...]] = {
    "Requests": (
        Term(
            "account",
            "The record of one request's KV-cache tokens. There is one account per request, and journal "
            "events are posted to it.",
            "`kvledger show JOURNAL REQUEST` prints the account of one request.",
        ),
        Term(
            "account statement",
            "The printed form of one account: each entry with its debit, credit and balance, then the "
            "settled figures.",
            "`kvledger show /tmp/tour/journal cold-bare-1`",
            ("statement",),
        ),
        Term(
            "admission",
            "The scheduler takes a waiting request, looks up its prompt in the prefix cache and the "
            "connector, and allocates blocks. A preempted request is admitted again.",
            "Entry `admitted, no local hit` in an account statement.",
            ("admitted",),
        ),
        Term(
            "life",
            "The time from an admission to the next preemption, to the release of the request after a "
            "failed load, or to the end of the request.",
            "A request that is preempted once has two lives.",
            ("lives",),
        ),
        Term(
            "preemption",
            "The scheduler takes a running request's blocks away and puts the request back into the "
            "waiting queue. The KV that the request had is lost unless a cache still holds it.",
            "Entry `discarded: preempted, no free blocks`, debit 32.",
            ("preempted",),
        ),
        Term(
            "balance",
            "The tokens of a request whose KV exists or is scheduled to exist: credits less debits. At "
            "the same instant it must equal the engine's `num_computed_tokens`.",
            "Scheduling 32 tokens raises the balance from 0 to 32. A preemption sets it to 0.",
            ("credit", "debit"),
        ),
        Term(
            "session",
            "A streaming-input request whose prompt grows by chunks while it runs.",
            "A prompt of 100 tokens that is extended to 180 has two chunks.",
            ("chunk",),
        ),
        Term(
            "carried",
            "Tokens of a session whose KV an earlier chunk already settled. A later chunk settles only "
            "its own tokens.",
            "The second chunk of a session with 100 + 80 prompt tokens carries 100 and settles 80.",
        ),
        Term(
            "waited",
            "The time that a request spent outside its lives: before its first admission, and from each "
            "preemption to the next admission.",
            "Column `waited, s` of `kvledger summary`.",
            ("waiting", "wait"),
        ),
        Term(
            "time to first token",
            "The time from the arrival of a request in the scheduler to its first output, each microsecond "
            "with one cause. vLLM's figure of this name also has the front end's share.",
            "Line `Time to first token` of `kvledger show` and `kvledger summary`.",
            ("ttft", "first token"),
        ),
    ),
    "Contents": (
        Term(
            "seal",
            "The fingerprint of a full block: 64 bits over its bytes in all layers, taken after the forward "
            "pass that executed its last position. The key of the fingerprint is new in every run.",
            "`2,310 blocks sealed, 9,800 verified at rest.`",
            ("sealed", "fingerprint"),
        ),
        Term(
            "sketch",
            "Sixteen numbers for a layer of a block: the products of its keys with eight random vectors, and "
            "of its values. Two computations of the same tokens have sketches that are near each other, "
            "although their bytes differ.",
            "`118 of 120 recomputed blocks differed by rounding only (at most 0.0004).`",
            ("sketches",),
        ),
        Term(
            "verified block",
            "A block that a request hit and whose bytes, compared just before the forward pass, were those "
            "that were sealed.",
            "`8,214 of 8,214 hit blocks held the bytes that were computed or loaded (262,848 tokens).`",
            ("verified",),
        ),
        Term(
            "scrub",
            "The comparison of blocks at rest with their seals, some in each step, as storage systems do. A "
            "scrub finds a change that no request has read yet.",
            "`A scrub found it in step 20.` in a finding `content/changed`.",
            ("scrubbed",),
        ),
    ),
    "Where prompt tokens came from": (
        Term(
            "settled",
            "The source of each prompt token is fixed once: local, external, computed or unattained; the "
            "four sum to the prompt, and no later preemption changes them. This happens at the first output "
            "if every token has valid KV by then, else at the first later one or at the request's end.",
            "`prompt settled: 32 external, 65 computed` for a prompt of 97 tokens.",
            ("settlement", "settle"),
        ),
        Term(
            "local",
            "A prompt token whose KV first came from the engine's own prefix cache.",
            "A second request with the same 64-token prefix has 64 local tokens.",
            ("local tokens", "local hit"),
        ),
        Term(
            "external tokens",
            "Prompt tokens whose KV first came from the KV connector: promised and loaded.",
            "A connector that stores KV on disk loads 32 tokens for a resumed request.",
            ("external", "external hit"),
        ),
        Term(
            "computed",
            "A prompt token whose KV the engine's model first computed.",
            "Every token of a prompt that no cache holds.",
            ("computed tokens",),
        ),
        Term(
            "unattained",
            "A prompt token that had no valid KV when its prompt was settled: the request ended first, the "
            "token was an invalid hit, or the connector promised it and never loaded it.",
            "A request that is aborted before its first output leaves 33 of its prompt tokens unattained.",
            ("unattained tokens",),
        ),
        Term(
            "invalid hit",
            "A local hit on a cached block without valid KV: its load failed or was never made, or the block "
            "was cached too early. Level `blocks` counts the tokens as unattained, not as local.",
            "`blocks/hash-content`: request b hit block 12, which has no valid KV.",
            ("invalid hits",),
        ),
        Term(
            "planned split",
            "The local and external tokens of the first admission whose request then ran; the rest of "
            "the prompt counts as computed. vLLM 0.26 and later report this split.",
            "An admission finds 64 local tokens for a prompt of 97: planned are 64 local, 33 computed.",
            ("planned", "plan"),
        ),
        Term(
            "engine-reported count",
            "A count that the engine itself reports, such as its per-request prompt split or its "
            "Prometheus counters. kvledger compares these counts with the ledger and never uses them as "
            "the source of truth.",
            "`reported: -32 local, 32 external, 60 computed`",
            ("engine-reported", "reported", "report"),
        ),
        Term(
            "waterfall",
            "A table that leads from one row of figures to the next by named differences. Indented rows "
            "lead from the line above to the line below.",
            "Ledger, settled -> `ended before any output` -> Planned, at first admission.",
            ("reconciliation", "difference"),
        ),
        Term(
            "unexplained",
            "The part of a difference that no rule of the ledger covers. It is never hidden in another "
            "cause.",
            "A row `unexplained` in a waterfall, printed red.",
        ),
        Term(
            "prefix-cache lookup",
            "The engine asks its prefix cache for the longest cached prefix of a request, and the "
            "connector for the tokens after it. An admission needs one; a failed attempt may need more.",
            "`vllm:prefix_cache_queries` counts the tokens of lookups.",
            ("lookup", "look-up"),
        ),
        Term(
            "cache miss",
            "A prompt token that was computed although a cache might have held it, or that had no KV at "
            "the end. `kvledger why` gives each miss the cause that the trace proves.",
            "195 tokens missed because the cache holds whole blocks only.",
            ("miss", "missed", "no hit"),
        ),
    ),
    "Work": (
        Term(
            "scheduled tokens",
            "Tokens that the scheduler gave to a step. Each is exactly one of: first prompt, first "
            "output, rework, rejected, overrun.",
            "68 scheduled = 65 first prompt + 3 first output.",
            ("scheduled", "work"),
        ),
        Term(
            "first prompt",
            "Scheduled prompt tokens that are computed for the first time.",
            "The 65 tokens of a prompt of 97 that no cache held.",
        ),
        Term(
            "first output",
            "Scheduled tokens that produce output at positions computed for the first time.",
            "One token per running request in a decode step.",
        ),
        Term(
            "rework",
            "Scheduled tokens whose KV existed before and was lost, so the engine computes them again.",
            "69 tokens of rework after preemptions.",
        ),
        Term(
            "engine time",
            "The time of all steps of an engine, without the time in which no request ran. Steps that "
            "overlap are not counted twice.",
            "Preemption cost 3.5 % of engine time.",
            ("engine seconds",),
        ),
        Term(
            "step model",
            "How long a step takes, by its prefill tokens, decoding requests, draft tokens and context, "
            "fitted to the steps of one journal; it turns tokens into seconds. Where steps don't follow "
            "a model, it is refused and seconds are unknown.",
            "`8 ms a step, 0.04 ms a prefill token; median error 2.1 % on held-out steps`",
            ("model of step time",),
        ),
        Term(
            "rejected",
            "Draft tokens of speculative decoding that the model did not accept.",
            "3 drafts, 1 accepted: 2 tokens rejected.",
            ("rejected drafts",),
        ),
        Term(
            "overrun",
            "Scheduled tokens that are no part of their request, because it had stopped: those in flight at "
            "the stop, and those computed past the end of the sequence, such as drafts accepted past the "
            "stop. The rule is the same for every release.",
            "Asynchronous scheduling runs one more step before it sees the stop token.",
        ),
        Term(
            "in flight",
            "Tokens that are scheduled and whose output has not arrived yet.",
            "The tokens of the step that runs on the GPU now.",
        ),
        Term(
            "suspense",
            "Tokens that were computed again with no recorded loss of their KV. An invariant says that "
            "there are none.",
            "`kvledger explain tokens/suspense`",
        ),
    ),
    "Connectors": (
        Term(
            "promise",
            "External tokens that the connector said it would load for an admission.",
            "`external tokens promised`, credit 32.",
            ("promised", "promised tokens"),
        ),
        Term(
            "failed or cancelled",
            "Promised tokens that were never loaded: the load failed, no load named them, or the request "
            "was preempted or ended first.",
            "`failed or cancelled: load failed`, 16 tokens.",
            ("void", "voided", "failed", "cancelled"),
        ),
        Term(
            "repeat hit",
            "Local hits over tokens whose KV the request had in an earlier life.",
            "Entry `local hit (repeat hit: 16)`: 16 tokens that the request had before.",
            ("hit again", "hit_again"),
        ),
        Term(
            "repeat load",
            "External tokens loaded over tokens whose KV the request had in an earlier life.",
            "`loaded 32 external tokens (repeat load: 32)`",
            ("loaded again", "loaded_again"),
        ),
        Term(
            "connector metadata",
            "What the connector's scheduler side sends to its worker side in each step "
            "(`KVConnectorMetadata`): which blocks to load and save.",
            "ExampleConnector's metadata names the requests to load.",
            ("metadata",),
        ),
        Term(
            "opaque",
            "A connector whose metadata kvledger can't read. Its loads are assumed to be as planned.",
            "A connector of your own, without a reader in `audit/engines/connector_metadata/`.",
        ),
        Term(
            "transfer",
            "KV that a prefill engine hands over to a decode engine (disaggregated prefill). It is "
            "counted apart from hits in a store, so that a fleet does not count a prompt twice.",
            "NixlConnector moves a finished prefill to the decode engine.",
            ("transferred", "disaggregated"),
        ),
        Term(
            "tracker",
            "A connector's own count of a request's tokens, from which it decides what to save.",
            "`connector/tracker-lag` fires when this count stays behind the scheduler's.",
        ),
        Term(
            "scenario",
            "The situations, fixed and random, through which `kvledger conformance` drives a connector.",
            "Preempt a request while its load is running.",
            ("course", "situation", "score card"),
        ),
    ),
    "Blocks": (
        Term(
            "block",
            "A fixed number of token positions of the KV cache, the unit that the engine allocates, "
            "caches and frees.",
            "With `block_size` 16, a prompt of 60 tokens fills 3 blocks and starts a fourth.",
        ),
        Term(
            "owner",
            "The request for which a block was allocated. Other requests that hit a cached block hold "
            "it too and are its holders.",
            "A finding of `blocks/` names both owners of a block.",
            ("holder", "holders"),
        ),
        Term(
            "cached block",
            "A full block that has its hash and is in the prefix cache. Evicting it removes the hash.",
            "vLLM's `cache_full_blocks` caches blocks when a step fills them.",
            ("cached", "evicted", "eviction"),
        ),
        Term(
            "isolation class",
            "A number that stands for what a request's KV depends on besides its tokens: the cache salt, the "
            "LoRA adapter, or a multimodal input. It is a keyed hash: a journal holds no salt.",
            "`blocks/isolation`: a request hit a block that was written with another cache salt.",
            ("isolation classes", "cache salt", "LoRA adapter"),
        ),
        Term(
            "level",
            "How much is recorded. Level `tokens` records token counts per request; level `blocks` also "
            "records each block's allocation, owner and hash.",
            "`KVLEDGER_LEVEL=blocks vllm serve MODEL`",
            ("level tokens", "level blocks", "tokens level", "blocks level"),
        ),
        Term(
            "kv event",
            "An engine's announcement that a block entered or left its prefix cache, or that the cache was "
            "cleared. vLLM publishes them in numbered batches, and routers keep an index from them.",
            "`kvledger journals record-events` records them; `kvledger audit` compares them with the blocks.",
            ("kv events",),
        ),
    ),
    "Verdicts": (
        Term(
            "verdict",
            "The result of an audit: clean, violated or unknown.",
            "`violated at level tokens: counts, progress; not examined: block contents, ownership`, "
            "exit code 1.",
        ),
        Term(
            "clean",
            "No invariant is violated, and no event is missing that could hide a violation. A clean run may "
            "have drifts.",
            "`clean, 11 drifts`, exit code 0.",
        ),
        Term(
            "violation",
            "A finding that the engine is wrong: an invariant does not hold.",
            "`tokens/negative`: the engine reported -32 local tokens.",
            ("violated", "violations"),
        ),
        Term(
            "drift",
            "A finding that does not change the verdict: the engine counts by a deliberate rule that "
            "misleads the reader of its figures, two computations of one block differ, or the caller chose "
            "it.",
            "`connector/failed-load-counted`: vLLM counts tokens whose load failed as external tokens.",
            ("drifts",),
        ),
        Term(
            "unknown",
            "An account that lost events touched, or whose beginning was not recorded. Nothing is "
            "claimed about an unknown account, and no figure includes it.",
            "`2 requests unknown` after a full disk.",
        ),
        Term(
            "finding",
            "A violation or a drift, with its request, step, figures and one sentence.",
            "`kvledger audit JOURNAL --format json` lists every finding under `violations`.",
            ("findings",),
        ),
        Term(
            "invariant",
            "A rule that must hold for every account, block or connector.",
            "`kvledger explain tokens/negative`",
            ("invariants", "check"),
        ),
    ),
    "Recording": (
        Term(
            "journal",
            "The folder of append-only files that one engine process writes, with lengths, counts and "
            "request ids. Prompts, token ids and outputs are never recorded.",
            "`KVLEDGER_DIR=/var/lib/kvledger` holds one journal per engine process.",
        ),
        Term(
            "segment",
            "One file of a journal. Each begins with a snapshot, so reading may begin at any segment.",
            "`00000001.kvl`",
            ("segments",),
        ),
        Term(
            "census",
            "A record of the engine-side counters of every request that runs, or was admitted and waits, "
            "written at least every 512 steps or 30 seconds, and at the end. It bounds how long a silent "
            "difference can live.",
            "A difference between the engine and the ledger shows at the next census at the latest.",
        ),
        Term(
            "snapshot",
            "The state of all living requests at the start of a segment. A reader already in sync checks "
            "the snapshot like a census; a new reader starts from it.",
            "The second event of every segment.",
        ),
        Term(
            "gap",
            "Events were lost, for example because the disk was full. Accounts that the gap may touch "
            "become unknown.",
            "Note `events were lost` in an audit.",
            ("lost events",),
        ),
        Term(
            "rotation",
            "The writer removes the oldest segments of its journal to keep the journal's size bound. That is "
            "no loss: requests that began before the first kept segment are left out of every figure, and "
            "the verdict of the others stands.",
            "Note `12 requests began before the first kept segment` in an audit.",
            ("rotated", "first kept segment"),
        ),
        Term(
            "lost tail",
            "The end of a journal whose engine is gone without `EngineStopped`: the engine was killed, or "
            "the last segments were removed. Events may be missing, so the verdict is unknown; requests "
            "that ended before keep theirs.",
            "Note `the trace is whole up to 2026-01-31 12:00:00 UTC` after `kill -9`.",
            ("not in good order",),
        ),
        Term(
            "checkpoint",
            "The saved state of `kvledger serve`. A restarted sidecar goes on from it without counting "
            "anything twice.",
            "`.kvledger/checkpoint` under the folder of journals.",
        ),
        Term(
            "hook",
            "A wrapper around one method of the engine. It copies a few counters and returns; it never "
            "changes what the engine does.",
            "`kvledger doctor` counts the hooks that fit the vLLM installed here.",
            ("hooks",),
        ),
        Term(
            "adapter",
            "The table of hooks for one family of vLLM releases.",
            "`kvledger doctor` names adapter `v1-0.27` for vLLM 0.32.",
            ("observer",),
        ),
        Term(
            "injection",
            "A defect of a released vLLM or connector that `kvledger demo --inject` puts back into the "
            "demo's engine.",
            "`kvledger demo --inject negative-local-hit`",
            ("inject",),
        ),
    ),
    "What another cache would have hit": (
        Term(
            "residual",
            "The difference between the hit rate of a replay at the recorded pool size and the recorded hit "
            "rate, in percentage points. Above 2 points `kvledger whatif` says not to trust its figures.",
            "`a residual of +0.00 points (400 of 400 admissions equal)`",
            ("calibration",),
        ),
        Term(
            "second tier",
            "A cache below the block pool, such as host memory or a KV store, to which every cached block is "
            "written and from which a prompt is loaded beyond its local hit.",
            "`kvledger whatif JOURNAL --tiers 40GiB`",
            ("tier", "tiers"),
        ),
        Term(
            "blocks short",
            "Blocks that running requests needed beyond the size of a replayed pool: the engine would have "
            "preempted requests or made them wait.",
            "`20  25.7 %  394 blocks short` in the curve of `kvledger whatif`.",
        ),
        Term(
            "prefix",
            "A stretch of blocks that requests share until they differ, named by a label that reveals "
            "nothing of the tokens.",
            "`kvledger summary prefixes JOURNAL`: prefix 1a30b1c1, tokens 0 to 128 of 128 requests.",
            ("prefixes",),
        ),
        Term(
            "idle block",
            "A free block whose content can be hit. Its idle time runs from the last release to the "
            "eviction.",
            "`idle before eviction, s` in `kvledger summary blocks JOURNAL`.",
            ("idle time",),
        ),
        Term(
            "kept rows",
            "Rows of requests in Parquet files, which `kvledger journals compact` writes, and which commands "
            "read in place of the journals.",
            "`kvledger export html DIR --since 7d -o page.html` reads kept rows.",
            ("kept facts",),
        ),
        Term(
            "block trace",
            "What the requests of an engine looked up, held, cached and released in its prefix cache, in "
            "order; `kvledger journals compact` keeps it as rows of `admissions` and `block_operations`.",
            "`kvledger whatif DIR --since 7d` reads kept rows in place of the journals.",
            ("block traces",),
        ),
    ),
}
"""Every term, by section, in the order of the page."""

TERMS: dict[str, Term] = {row.name: row for rows in SECTIONS.values() for row in rows}
"""Every term by its name."""

_BY_SPELLING = {spelling: row for row in TERMS.values() for spelling in (row.name, *row.aliases)}


def term(text: str) -> Term | None:
    """The term of this name or alias; case, hyphens and underscores don't matter."""
    plain = " ".join(text.casefold().split())
    spaced = " ".join(plain.replace("-", " ").replace("_", " ").split())
    for spelling, row in _BY_SPELLING.items():
        if spelling == plain or spelling.replace("-", " ").replace("_", " ") == spaced:
            return row
    return None


def spellings() -> list[str]:
    """Every name and alias, for suggestions."""
    return list(_BY_SPELLING)


def explain(row: Term) -> str:
    """A term for a terminal."""
    paragraphs = (row.meaning, f"Example: {row.example}")
    return "\n\n".join((f"{row.name} (term)", *(textwrap.fill(text, WIDTH) for text in paragraphs)))


def markdown() -> str:
    """docs/reference/glossary.md: every term, by section."""
    lines = [
        "# Glossary",
        "",
        "Made by `make docs`; do not edit.",
        "",
        "`kvledger explain TERM` prints one entry. The invariants are in [invariants](invariants.md).",
    ]
    for section, rows in SECTIONS.items():
        lines += ["", f"## {section}"]
        for row in rows:
            lines += ["", f"### {row.name}", "", row.meaning, "", f"Example: {row.example}"]
    return "\n".join(lines) + "\n"
