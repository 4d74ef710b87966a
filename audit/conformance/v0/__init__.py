"""Scenarios of vLLM's v0 scheduler, and their driver."""
