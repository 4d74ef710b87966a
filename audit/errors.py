"""The error for a user's mistake: one sentence and an exit code."""

from __future__ import annotations


class LedgerError(Exception):
    """A user's mistake. The command line prints the sentence and exits with ``exit_code``."""

    exit_code = 2


class JournalError(LedgerError):
    """One journal can't be read, or lacks what a command needs. The others are read without it."""


class Missed(JournalError):
    """Figures were kept and can't be used: what there is no more is unknown."""

    exit_code = 3
