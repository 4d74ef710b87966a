"""vLLM's OpenAI-compatible server on a machine without a GPU, with the packages of LMCache.

vLLM's dispatcher of Triton kernels inspects every imported module, and some of LMCache's raise when they are
inspected. vLLM's processes import this module as their main module, so the change is made in each.
"""

from __future__ import annotations

import runpy

from vllm.triton_utils import dispatcher

dispatcher._rebind_kernels = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
