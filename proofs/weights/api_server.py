"""vLLM's OpenAI-compatible server whose weights can be loaded again on a CPU, and come from folders.

vLLM's processes import this module as their main module, so the preparation is made in each.
"""

from __future__ import annotations

import runpy

from proofs.weights.engine import prepare

prepare(in_process=False)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
