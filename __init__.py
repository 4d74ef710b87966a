"""kvledger: a double-entry ledger for the KV-cache tokens of a serving engine.

Only the version, `attach`, `mark_weights`, `Audit` and the IPython extension live here; importing this module
imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audit.entry.attach import attach
    from .audit.entry.weights import mark_weights

__version__ = "0.1.0"

__all__ = ["Audit", "__version__", "attach", "mark_weights"]


def __getattr__(name: str) -> Any:
    """Import `attach`, `mark_weights` or `Audit` at its first use, so that `import kvledger` stays light."""
    if name == "attach":
        from .audit.entry.attach import LiveAudit, attach

        LiveAudit.open_journal = _open_journal
        return attach
    if name == "mark_weights":
        from .audit.entry.weights import mark_weights

        return mark_weights
    if name == "Audit":
        return _audit_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _audit_class() -> Any:
    """The class of :mod:`kvledger.exporters.notebook`, imported at its first use; it needs our version."""
    return import_module(".exporters.notebook", __name__).Audit


def _open_journal(path: Any) -> Any:
    """The reports of a live audit."""
    return _audit_class()(path)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext kvledger` in IPython: register the cell magic `%%audit`."""
    from .audit.entry.attach import LiveAudit
    from .audit.entry.notebook import load

    LiveAudit.open_journal = _open_journal
    load(shell)
