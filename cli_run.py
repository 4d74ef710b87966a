"""How a command is registered, what it returns, and how the process ends.

Not here: the commands, which are in ``cli.py``, and how an option is declared (``cli_options.py``). Nothing
but typer is imported before a command needs it.
"""

from __future__ import annotations

import errno
import functools
import inspect
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

import typer

from . import __version__
from . import cli_options as opt
from .cli_options import option
from .exporters.answer import Answer

CODES = {"clean": 0, "violated": 1, "unknown": 3}
BAD_INPUT = 2
OWN_BUG = 70
INTERRUPTED = 130
READER_GONE = 141
COMPLETE = "_KVLEDGER_COMPLETE"

app = typer.Typer(
    name="kvledger",
    cls=opt.Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# --- what a command takes and returns -------------------------------------------------------------------


class Reading(NamedTuple):
    """Which requests of the journals a command reads, and in which processes.

    A command takes the options that its parameter ``read`` names.
    """

    since: str = option(
        "--since TIME", "Only requests that ended at TIME or later: an ISO time, or an age such as 15m."
    )
    until: str = option("--until TIME", "Only requests that ended before TIME.")
    jobs: int = option("--jobs -j N", "Number of processes. Default: one per core.")
    dask: str = option("--dask ADDRESS", "Read the journals on the workers of the Dask scheduler at ADDRESS.")

    @contextmanager
    def journals(self, paths: list[Path], *, local: bool = False) -> Iterator[Any]:
        """The journals, the time window and what runs over them, with a progress bar on a terminal."""
        from .audit.replay.windows import window
        from .exporters.inputs import reading

        chosen = window(self.since, self.until)
        with reading(paths, self.jobs, self.dask, local=local) as (places, run):
            yield places, chosen, run


DEFAULTS = Reading(since="", until="", jobs=1, dask="")
"""What a command reads with that takes none of these options: everything, in this process."""

# The options that a command takes.
NONE: Any = ()
WINDOW: Any = ("since", "until")
JOBS: Any = ("jobs",)
NOT_DASK: Any = ("since", "until", "jobs")
ALL: Any = Reading._fields


Function = TypeVar("Function", bound=Callable[..., Answer | int | None])


def command(
    panel: str, *examples: str, exit_codes: str = "", name: str | None = None
) -> Callable[[Function], Function]:
    """Register a command by the question that it answers (``panel``), with examples at the end of its help.

    It returns an exit code, or a :class:`Answer`, which is printed in the format that its option says.
    """

    def register(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        names = signature.parameters["read"].default if "read" in signature.parameters else None

        @functools.wraps(function)
        def call(**given: Any) -> None:
            if names is not None:
                given["read"] = DEFAULTS._replace(**{each: given.pop(each) for each in names})
            found = function(**given)
            if isinstance(found, Answer):
                from .exporters import writers

                writers.show(found, given["format"])
                found = found.code
            raise typer.Exit(found or 0)

        parameters = _parameters(signature)
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        epilog = opt.examples(*examples, exit_codes=exit_codes)
        app.command(name, cls=opt.Command, rich_help_panel=panel, epilog=epilog)(call)
        return function

    return register


def further(name: str, *examples: str, exit_codes: str = "") -> Callable[[Function], Function]:
    """Register a command whose ``name`` is that of another command and a second word.

    The examples lack the name.
    """
    return command("", *(f"{name} {words}" for words in examples), exit_codes=exit_codes, name=name)


def _parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """The parameters of a command, with the options of :class:`Reading` in place of ``read``."""
    types, found = get_type_hints(Reading), []
    for each in signature.parameters.values():
        if each.name == "read":
            for name in each.default:
                declared = Reading._field_defaults[name]
                found.append(each.replace(name=name, default=declared, annotation=types[name]))
        else:
            found.append(each)
    for each in found:
        if each.default.default is None and isinstance(each.annotation, type):
            each.default.default = each.annotation()
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = option("--version", "Print the version.", callback=_print_version, is_eager=True),
    debug: bool = option("--debug", "Print the traceback of an error."),
) -> None:
    """Audit the KV-cache token accounting of vLLM engines."""


# --- how it ends ----------------------------------------------------------------------------------------


class LeftOut(logging.Handler):
    """Passes each sentence about a journal that is left out to ``write``, once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self.said: set[str] = set()
        """The sentences."""
        self._write = write
        """Prints or logs a sentence."""

    def emit(self, record: logging.LogRecord) -> None:
        """See the base."""
        sentence = record.getMessage()
        if sentence not in self.said:
            self.said.add(sentence)
            self._write(sentence)


@contextmanager
def left_out_to(write: Callable[[str], object]) -> Iterator[LeftOut]:
    """Pass what is left out meanwhile to ``write``, and to nobody else."""
    logger, handler = logging.getLogger("kvledger.journals"), LeftOut(write)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield handler
    finally:
        logger.handlers, logger.propagate = before


def _print_left_out(sentence: str) -> None:
    from .audit.text import printable

    print(printable(" ".join(sentence.split())), file=sys.stderr)


def main() -> NoReturn:
    """Run the command line; an error becomes one sentence on standard error and an exit code.

    A result that lacks a journal is unknown, unless something is violated in the others.
    """
    debug = "--debug" in sys.argv[1:]
    if sys.stdout is None:  # the caller closed it and wants the exit code only
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an id may have letters that the locale lacks
    try:
        words = [word for word in sys.argv[1:] if word != "--debug"]
        if COMPLETE in os.environ:
            from typer.completion import completion_init  # type: ignore[attr-defined]

            completion_init()
        with _ended_in_order(), left_out_to(_print_left_out) as left:
            code = app(words, prog_name="kvledger", standalone_mode=False) or 0
        code = code or (CODES["unknown"] if left.said else 0)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_gone()
    except SystemExit as leaving:  # typer and rich turn a broken pipe into this
        gone = isinstance(leaving.__context__, BrokenPipeError)
        code = _reader_gone() if gone else leaving.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = print_error(error)
    if _a_query_runs_on():  # Python would wait for its thread
        _flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end the command like an error: its temporary folders go, and its children end."""

    def ended(number: int, _: object) -> None:
        processes = sys.modules.get("multiprocessing")
        for child in processes.active_children() if processes else ():
            child.terminate()
        sys.exit(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _a_query_runs_on() -> bool:
    tables = sys.modules.get(f"{__package__}.exporters.facts.tables")
    return tables is not None and bool(tables.left_behind)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _reader_gone() -> int:
    """The reader of our output closed the pipe: write nothing more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def print_error(error: Exception) -> int:
    """Print one sentence on standard error and return the exit code."""
    from .audit.errors import LedgerError, missing
    from .audit.release_semantics import CONTRACTS
    from .audit.text import printable

    usage = getattr(error, "format_message", None)  # click's errors, whichever click typer uses
    if type(error).__name__ == "NoArgsIsHelpError":
        print(usage() if usage else error)
        return BAD_INPUT
    if isinstance(error, LedgerError):
        sentence, code = str(error), error.exit_code
    elif usage is not None:
        sentence, code = usage(), BAD_INPUT
        if sentence.startswith("Missing argument"):
            words = error.ctx.get_usage().removeprefix("Usage:")  # type: ignore[attr-defined]
            words = words.replace("[OPTIONS] ", "").replace("{", "").replace("}", "")
            sentence = f"{sentence.rstrip('.')}; write {words}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        sentence, code = f"The output can't be written: {error.strerror}", BAD_INPUT
    elif isinstance(error, ModuleNotFoundError):
        sentence, code = str(missing(error)), BAD_INPUT
    else:
        sentence = f"kvledger itself failed ({type(error).__name__}: {error}); --debug shows where"
        code = OWN_BUG
    sentence = printable(" ".join(sentence.split()))
    names = (each.name for each in CONTRACTS.values())
    if not any(
        word and sentence.startswith(word) for word in (*names, *sys.argv[1:])
    ):  # a path keeps its case
        sentence = sentence[:1].upper() + sentence[1:]
    print(sentence if sentence.endswith((".", "?", "!")) else f"{sentence}.", file=sys.stderr)
    return code
