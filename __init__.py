"""kvledger: a double-entry ledger for the KV-cache tokens of a serving engine.

The names here are public: `attach`, `Audit`, `mark_weights`, what they return and raise, and the IPython
extension. Each is imported at its first use, so that `import kvledger` imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PLACES = {
    "Account": (".audit.ledger.account", "AccountStatement"),
    "Audit": (".exporters.notebook", "Audit"),
    "AuditError": (".audit.entry.attach", "AuditError"),
    "AttachedAudit": (".exporters.notebook", "AttachedAudit"),
    "Coverage": (".audit.checks.coverage", "Coverage"),
    "LedgerError": (".audit.errors", "LedgerError"),
    "Totals": (".audit.figures.totals", "Totals"),
    "Violation": (".audit.checks.registry", "Violation"),
    "attach": (".exporters.notebook", "attach"),
    "mark_weights": (".audit.entry.weights", "mark_weights"),
}
"""Module and name of each public name."""

__all__ = [
    "Account",
    "AttachedAudit",
    "Audit",
    "AuditError",
    "Coverage",
    "LedgerError",
    "Totals",
    "Violation",
    "__version__",
    "attach",
    "mark_weights",
]

if TYPE_CHECKING:
    from .audit.checks.coverage import Coverage
    from .audit.checks.registry import Violation
    from .audit.entry.attach import AuditError
    from .audit.entry.weights import mark_weights
    from .audit.errors import LedgerError
    from .audit.figures.totals import Totals
    from .audit.ledger.account import AccountStatement as Account
    from .exporters.notebook import AttachedAudit, Audit, attach
else:

    def __getattr__(name):
        """Import a public name at its first use."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, found = _PLACES[name]
        return getattr(import_module(module, __name__), found)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: object) -> None:
    """`%load_ext kvledger` in IPython: register the cell magic `%%audit`."""
    import_module(".exporters.magic", __name__).load(shell)
