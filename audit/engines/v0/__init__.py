"""vLLM v0: releases 0.9.1 and 0.9.2 without ``VLLM_USE_V1``."""
