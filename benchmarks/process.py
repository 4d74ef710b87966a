"""What every benchmark sets in its own process before vLLM is imported."""

from __future__ import annotations

import logging
import os

from kvledger.audit.demo.engine import settle_environment


def settle() -> None:
    """Set vLLM's variables, unset kvledger's, and keep vLLM's warnings off the terminal."""
    settle_environment(in_process=True)
    os.environ.pop("KVLEDGER_DIR", None)
    # Only a whole engine sets its log level from vLLM's variables.
    logging.getLogger("vllm").setLevel(logging.ERROR)
