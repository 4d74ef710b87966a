"""The error for a user's mistake: one sentence and an exit code."""

from __future__ import annotations


class LedgerError(Exception):
    """A user's mistake. The command line prints the sentence and exits with ``exit_code``."""

    exit_code = 2


EXTRAS = {
    "analysis": ("duckdb", "pandas", "pyarrow"),
    "fleet": ("dask", "distributed", "fsspec"),
    "lmcache": ("lmcache",),
    "otel": ("opentelemetry",),
    "routing": ("dynamo",),
    "vllm": ("torch", "transformers", "vllm"),
    "web": ("bcrypt", "yaml"),
}
"""The modules of each extra."""

PACKAGES = {
    "analysis": "duckdb pandas pyarrow",
    "fleet": "'dask[distributed]' fsspec",
    "lmcache": "lmcache",
    "otel": "opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http",
    "routing": "ai-dynamo-runtime",
    "vllm": "vllm",
    "web": "bcrypt pyyaml",
}
"""The packages of each extra, for ``pip install``: they can be had wherever kvledger came from."""


def missing(error: ModuleNotFoundError, what: str = "This command") -> LedgerError:
    """A sentence for a module that is not installed, with the packages of the extra that has it."""
    name = (error.name or "a module").partition(".")[0]
    extra = next((extra for extra, needs in EXTRAS.items() if name in needs), "")
    how = f"; the {extra} extra has it: pip install {PACKAGES[extra]}" if extra else ""
    return LedgerError(f"{what} needs {name}, which is not installed{how}.")


class JournalError(LedgerError):
    """One journal can't be read, or lacks what a command needs. The others are read without it."""


class Missed(JournalError):
    """Figures were kept and can't be used: what there is no more is unknown."""

    exit_code = 3
