"""Writes the partition card into docs/reference/connectors.md: which differences part the KV of two requests.

Usage: make proof NAME=keys

Runs `kvledger conformance --keys` on the releases of :data:`RELEASES` for the prefix cache and KV events, and
for the connectors that run on this CPU, LMCache's with its own store; `proofs/keys_router.py` asks Dynamo's
router. Exits with 1 if a card can't be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import releases
from benchmarks.page import put
from proofs.cards import ADAPTER, CONNECTORS, COPIED, COPYING, LMCACHE, OURS, PAGE, PLAIN, ROOT
from proofs.routed import routers
from stores import environ, store

RELEASES = ("0.20.0", "0.24.0", "0.28.0", "0.32.0", "0.33.0")
LEFT_OUT = ("DecodeBenchConnector", "MultiConnector")
"""One makes KV up; the other has what its children have."""

ROUTER = """
Dynamo's KvRouter (`ai-dynamo-runtime` 1.6.1) over the KV events of vLLM 0.32's real scheduler. It is asked
with the tokens, the adapter's name, the identities of images, and the salt as namespace; where it does not
find an equal request so, by the tokens alone. Of salts and images it knows those that its own frontend names,
the last two rows. An index is of one model, and a worker of one engine, so differences of engines are left
out:
"""

BEGIN, END = "## Partition card\n", "## Score cards\n"
SAYS = """
Two requests have the same tokens and differ in one thing. A place *parts* them, or they *share* KV that was
made for one of them, and for how many tokens. *no control*: an equal request gets nothing either, for example
because the store is of one process. *not here*: the place or the release does not know the difference. KV
events part them if an event tells the difference beside the block's hash: a router that hashes tokens itself
needs that. No place has the weights in its key: engines with other weights under one model name and
revision are equal to it. A store that converts KV may rightly share it between block sizes. `kvledger
conformance --keys` makes a card of the installed releases; this section is written by `make proof NAME=keys`.
"""


def card(name: str = "", options: list[str] | None = None, variables: Mapping[str, str] = PLAIN) -> Any:
    """One card: of a connector, or of the prefix cache."""
    words = [*([name] if name else []), "--keys", "--format", "json", *(options or [])]
    done = subprocess.run(
        [ROOT / ".venv/bin/python", "-m", "kvledger", "conformance", *words],
        cwd=ROOT,
        env={**variables, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        timeout=900,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 3) or not done.stdout:
        sys.exit(
            f"{name or 'prefix cache'}: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}"
        )
    return json.loads(done.stdout)


def by_release(release: str) -> Any:
    """The card of a release's prefix cache."""
    releases.build([release])
    path = releases.environ(release).get("PYTHONPATH", "")
    variables = {**releases.environ(release), "PYTHONPATH": os.pathsep.join(filter(None, (path, OURS)))}
    return card(variables=variables)


def of_router() -> Any:
    """The card of Dynamo's router."""
    done = subprocess.run(
        [ROOT / ".venv/bin/python", "-m", "proofs.keys_router", routers() / "bin" / "python"],
        cwd=ROOT,
        env={**PLAIN, "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    return json.loads(done.stdout)


def table(cards: Mapping[str, Any], place: int = 0) -> list[str]:
    """One table: a row for each difference, a column for one place of each card."""
    lines = [f"| two requests differ in | {' | '.join(cards)} |", "|---" * (1 + len(cards)) + "|"]
    for rows in zip(*(one["rows"] for one in cards.values()), strict=True):
        cells = (cell(row, one["places"][place]) for row, one in zip(rows, cards.values(), strict=True))
        lines.append(f"| {rows[0]['difference']} | {' | '.join(cells)} |")
    return lines


def cell(row: Mapping[str, Any], place: str) -> str:
    """One cell of the table. What an event tells is no number of tokens."""
    word: str = row["cells"][place]
    if word == "shares":
        return "**shares**" if place == "KV events" else f"**shares {row['shared']}**"
    return f"{word}: {row['problem']}" if row["problem"] else word


def main() -> None:
    """Write the tables into the page."""
    caches = {release: by_release(release) for release in RELEASES}
    stores = {name: card(name, options) for name, options in CONNECTORS.items() if name not in LEFT_OUT}
    with store("multiprocess") as server:
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        stores[LMCACHE] = card(LMCACHE, ["--options", json.dumps(where)], environ(OURS))
    stores[ADAPTER] = card(ADAPTER, [*COPIED, json.dumps(COPYING)], environ(OURS))
    router = of_router()
    engines = ", ".join(sorted({one["engine"] for one in stores.values()}))
    lines = [
        BEGIN.rstrip(),
        SAYS.rstrip(),
        "",
        "The prefix cache of vLLM, by release:",
        "",
        *table(caches),
        "",
    ]
    lines += ["Its KV events:", "", *table(caches, 1), ""]
    lines += [f"Stores of connectors ({engines}):", "", *table(stores), ROUTER]
    lines += table({router["places"][0]: router})
    put("\n".join(lines), PAGE, before=END.rstrip())


if __name__ == "__main__":
    main()
