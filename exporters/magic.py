"""The IPython extension: ``%load_ext kvledger``, then ``%%audit llm`` at the top of a cell.

The cell runs with the engine attached, and its audit is the result of the cell, which a notebook displays. An
exception of the cell is one of the magic, so that no later cell runs by itself. Imports nothing of IPython:
the shell is an argument.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any, NoReturn

from ..audit.errors import LedgerError
from .notebook import AttachedAudit, attach

MAGIC = "audit"
VARIABLE = "audit"
"""The notebook's variable that keeps the last audit, if ``-o`` names no other."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises a sentence: ``exit`` would end the kernel's cell without a word."""

    def error(self, message: str) -> NoReturn:
        raise LedgerError(f"%%{MAGIC}: {message}. {' '.join(self.format_usage().split())}")


class CellFailed(LedgerError):
    """The cell raised; its traceback is printed already, so a notebook prints only this sentence."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def load(shell: Any) -> None:
    """Register the cell magic with an IPython shell."""

    def magic(line: str, cell: str) -> AttachedAudit | None:
        if line.strip() in ("-h", "--help"):
            print(_parser().format_help())
            return None
        try:
            return _run(shell, line, cell)
        except CellFailed:
            raise
        except LedgerError as error:
            print(error, file=sys.stderr)
            return None

    magic.__doc__ = _parser().format_help()
    shell.register_magic_function(magic, magic_kind="cell", magic_name=MAGIC)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"%%{MAGIC}",
        description="Run the cell and audit what the engine does meanwhile.",
        add_help=False,
    )
    parser.add_argument("target", metavar="ENGINE", help="an LLM, LLMEngine, EngineCore or Scheduler")
    parser.add_argument("--level", default="tokens", help="tokens (the default), blocks or content")
    parser.add_argument("--strict", action="store_true", help="raise at the step that breaks an invariant")
    parser.add_argument(
        "-o", "--output", default=VARIABLE, metavar="NAME", help=f"keep the audit as NAME, not as {VARIABLE}"
    )
    return parser


def _run(shell: Any, line: str, cell: str) -> AttachedAudit:
    given = _parser().parse_args(shlex.split(line))
    try:
        target = shell.ev(given.target)
    except NameError as error:
        raise LedgerError(f"%%{MAGIC}: {error}.") from error
    with attach(target, strict=given.strict, level=given.level) as audit:
        shell.user_ns[given.output] = audit
        result = shell.run_cell(cell)  # prints the traceback of an exception itself
    raised = result.error_before_exec or result.error_in_exec
    if raised is not None:
        raise CellFailed(
            f"The cell raised {type(raised).__name__}. {given.output} has what the engine did until then: "
            f"{audit!r}"
        )
    return audit
