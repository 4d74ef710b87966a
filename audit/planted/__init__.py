"""Planted faults: what can be put wrong in a sound engine, to see what the audit says of it."""
