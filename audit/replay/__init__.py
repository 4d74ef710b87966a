"""Journals read again: one engine audit per journal, checkpoints, and several journals at once."""
