"""kvledger: a double-entry ledger for the KV-cache tokens of a serving engine.

Only the version, `attach` and the IPython extension live here; importing this module imports nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audit.entry.attach import attach

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "attach"]


def __getattr__(name: str) -> object:
    """Import `attach` at its first use, so that `import kvledger` stays light."""
    if name == "attach":
        from .audit.entry.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext kvledger` in IPython: register the cell magic `%%audit`."""
    from .audit.entry.notebook import load

    load(shell)
