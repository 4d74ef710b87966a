"""The environment variables that kvledger reads, and those that look like one but are not."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

PREFIX = "KVLEDGER_"

ENGINE = {
    "KVLEDGER_DIR": "the folder of the journals; without it the plugin does nothing",
    "KVLEDGER_LEVEL": "tokens (the default), blocks for the block pool too, or content to verify its KV",
    "KVLEDGER_CONTENT_SHARE": "the share of hit blocks that level content verifies, 1 by default",
    "KVLEDGER_CONTENT_SCRUB_BYTES": "bytes of blocks at rest that level content verifies in a step",
    "KVLEDGER_CONTENT_KEY": "the key of the fingerprints, for engines whose transfers are compared",
    "KVLEDGER_CONTENT_SKETCH": "1: level content compares blocks that are computed again",
    "KVLEDGER_CONTENT_WEIGHTS_SECONDS": "from one look of level content at the weights to the next, 10 by "
    "default; 0: never",
    "KVLEDGER_CONTENT_STORE": "who alone writes to the connector's store: own (this engine) or fleet "
    "(engines with the same KVLEDGER_CONTENT_KEY)",
    "KVLEDGER_EVENTS_KEY": "a secret of 16 or more characters, by which KV events are compared with blocks",
    "KVLEDGER_GROUP": "a regular expression over request ids; what it finds is the request's group",
    "KVLEDGER_SESSION": "a regular expression over request ids; what it finds is the request's session, "
    "where vLLM knows none",
    "KVLEDGER_USAGE_LOG": "the file to which the middleware writes what clients are told",
    "KVLEDGER_NAME": "the engine's name in journals, instead of the host's name",
    "KVLEDGER_JOURNAL_BYTES": "the most bytes of one engine's journal",
    "KVLEDGER_TOTAL_BYTES": "the most bytes of all journals in the folder",
}
"""Read in the processes of an engine."""

SIDECAR = {
    "KVLEDGER_WEB_LISTEN_ADDRESS": "--web.listen-address",
    "KVLEDGER_WEB_CONFIG_FILE": "--web.config.file",
    "KVLEDGER_WEB_TELEMETRY_PATH": "--web.telemetry-path",
    "KVLEDGER_STATE": "--state",
    "KVLEDGER_COMPACT": "--compact",
    "KVLEDGER_KEEP": "--keep",
    "KVLEDGER_ENGINE_URL": "--engine-url; several URLs are separated by blanks",
    "KVLEDGER_LOG_LEVEL": "--log.level",
    "KVLEDGER_LOG_FORMAT": "--log.format",
}
"""Read by ``kvledger serve``, each in place of an option."""

OTHER = {
    "KVLEDGER_DEBUG": "the auditor checks the ledger's own state after every event",
    "KVLEDGER_KILLS": "how often the crash test kills the sidecar",
}

VARIABLES = ENGINE | SIDECAR | OTHER
"""Every variable, and what it sets."""


def unknown(environ: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each variable that begins like kvledger's and that kvledger does not read."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            nearest = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)
            yield f"kvledger does not know the environment variable {name}; the nearest name is {nearest[0]}"
