"""How a user starts observing an engine: attach, the vLLM plugin, the pytest plugin, the doctor."""
