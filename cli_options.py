"""How options are declared, those that several commands take, and how help is laid out.

Not here: the commands, and the options that one command takes, which are in ``cli.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

AUDIT_CODES = (
    "Exit codes: 0 clean; 1 violated; 2 bad usage or input; 3 unknown (events or journals are missing) and "
    "nothing violated"
)
EXIT_CODES = f"{AUDIT_CODES}; 4 the demo's engine did not run; 70 a defect of kvledger."

RIGHT = "Is it right?"
WHY = "Why?"
WHATIF = "What if?"
SETUP = "Set it up"
TRY = "Try it"
FOOTER = "Options: --version, --debug, -h. After a command: -h, or one of the [words]."
PANELS = (RIGHT, WHY, WHATIF, SETUP, TRY)


RENAMED = {
    "prefixes": "summary prefixes",
    "blocks": "summary blocks",
    "store": "summary store",
    "turns": "why turns",
    "tail": "audit follow",
    "usage": "check usage",
    "routing": "check routing",
    "bisect": "repro bisect",
    "export-checks": "repro checks",
    "faults": "doctor faults",
    "dashboards": "deploy boards, deploy rules or deploy check",
    "ls": "journals",
    "compact": "journals compact",
    "prune": "journals prune",
    "record-events": "journals record-events",
    "report": "export html",
    "timeline": "export timeline",
    "version": "--version",
}
"""What the commands of earlier versions are called now."""


class Command(TyperCommand):
    """A command whose help names its arguments without their Python types, and the commands below it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options, then the commands whose first word is this command."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = param.param_type_name
                name = param.metavar if kind == "argument" and param.metavar else record[0]
                rows[kind].append((name, record[1]))
        below = ctx.parent.command.below(ctx.info_name) if ctx.parent else {}
        named = [(f"{ctx.info_name} {word}", sentence(each)) for word, each in below.items()]
        sections = (("Arguments", rows["argument"]), ("Options", rows["option"]), ("See also", named))
        for heading, lines in sections:
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """See the base; also the second words of commands."""
        return [*_second_words(ctx, incomplete), *super().shell_complete(ctx, incomplete)]


class Commands(TyperGroup):
    """Commands by the question that they answer, each with the first sentence of its help.

    The name of a command may have two words: ``summary blocks`` is below ``summary``, which is a command too.
    """

    def below(self, name: Any) -> dict[str, Any]:
        """The commands whose first word is ``name``, by their second."""
        first = f"{name} "
        return {each.removeprefix(first): it for each, it in self.commands.items() if each.startswith(first)}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See the base; also commands of two words, and those that have another name now."""
        two = " ".join(args[:2])
        if len(args) > 1 and two in self.commands:
            return two, self.commands[two], args[2:]
        if args[0] in RENAMED and not ctx.resilient_parsing:
            from .audit.errors import LedgerError

            raise LedgerError(f"Write kvledger {RENAMED[args[0]]} in place of kvledger {args[0]}.")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """See the base; a second word only after the first."""
        found = super().shell_complete(ctx, incomplete)
        return [each for each in found if " " not in each.value or " " in incomplete]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write one line for each command, by the question that it answers."""
        formatter.write(f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]...\n{sentence(self)}\n")
        listed = [(each, it) for each, it in self.commands.items() if " " not in each]
        width = max(len(name) for name, _ in listed) + 2
        for panel in PANELS:
            label = panel
            for name, command in listed:
                if command.rich_help_panel == panel:  # type: ignore[attr-defined]
                    words = f" [{'|'.join(self.below(name))}]" if self.below(name) else ""
                    formatter.write(f"{label:14}{name:{width}}{sentence(command)}{words}\n")
                    label = ""
        formatter.write(f"{FOOTER}\n")


def sentence(command: Any) -> str:
    """The first sentence of a command's help."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _second_words(ctx: Any, incomplete: str) -> list[Any]:
    """The second words of commands that complete what is typed, if nothing is typed before."""
    sources = [ctx.get_parameter_source(each.name) for each in ctx.command.params]
    if ctx.parent is None or any(each is not None and each.name == "COMMANDLINE" for each in sources):
        return []
    first = f"{ctx.info_name} "
    found = ctx.parent.command.shell_complete(ctx.parent, first + incomplete)
    for each in found:
        each.value = each.value.removeprefix(first)
    return list(found)


def _second_words_typed(ctx: Any, incomplete: Any) -> list[tuple[str, str]]:
    """The same in typer's form, for arguments."""
    return [(each.value, each.help or "") for each in _second_words(ctx, incomplete)]


def examples(*lines: str, exit_codes: str = "") -> str:
    """The end of a command's help. ``\\b`` keeps the line breaks of the examples."""
    if not lines:
        return exit_codes
    examples = "\n".join(("\b\nExamples:", *(f"  kvledger {line}" for line in lines)))
    return f"{examples}\n\n{exit_codes}" if exit_codes else examples


# --- how an option is declared --------------------------------------------------------------------------
# An option is the default of its parameter: `top: int = option("--top N", "How many prefixes to list.", 20)`.


def option(declared: str, help: str, default: Any = None, **more: Any) -> Any:
    """The option ``declared`` as help shows it: ``--output -o FILE``. One without a metavar is a flag.

    ``default`` is shown in help; ``...`` makes the option required. Without one, it is the empty value of the
    parameter's type: "", 0, or None where the type allows it.
    """
    names, metavar = _split(declared)
    shown = default is not None and default is not ...
    value = default if metavar else False
    return typer.Option(value, *names, metavar=metavar, show_default=shown, help=help, **more)


def choice(declared: str, help: str, default: str | None = None, **more: Any) -> Any:
    """An option that takes one of a few words, ``--index own|tokens``; by default the first."""
    words = declared.split()[-1].split("|")
    return option(declared, help, default or words[0], callback=one_of(words), **more)


def setting(declared: str, help: str, default: Any = None, kind: Callable[..., Any] = option) -> Any:
    """An option that a variable of its name sets too: ``--log.level`` is ``KVLEDGER_LOG_LEVEL``."""
    (name, *_), _ = _split(declared)
    variable = name.lstrip("-").replace("-", "_").replace(".", "_").upper()
    return kind(declared, help, default, envvar=f"KVLEDGER_{variable}")


def argument(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An argument; required unless it has a ``default``."""
    more["autocompletion"] = _second_words_typed
    return typer.Argument(default, metavar=metavar, show_default=False, help=help, **more)


def journals(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An argument whose paths may be short names of journals, as ``kvledger journals`` prints them.

    With a single name of what it takes, it is ``KVLEDGER_DIR`` where it is not given.
    """
    if metavar in ("PATH", "PATHS"):
        more = {"envvar": "KVLEDGER_DIR", "show_envvar": False} | more
    return argument(metavar, help, default, callback=_named, **more)


def _named(given: Any) -> Any:
    from .audit.replay.find import named

    if isinstance(given, list | tuple):
        return [named(path) for path in given]
    return named(given) if given is not None else None


def one_of(words: list[str]) -> Callable[[str], str]:
    """Refuses a value that is none of ``words``."""

    def check(value: str) -> str:
        if value not in words:
            *others, last = words
            raise typer.BadParameter(f"{value!r} is none of {', '.join(others)} and {last}.")
        return value

    return check


def _split(declared: str) -> tuple[list[str], str | None]:
    """The names of an option and its metavar; a flag has none."""
    words = declared.split()
    return [word for word in words if word.startswith("-")], None if words[-1].startswith("-") else words[-1]


# --- what several commands take -------------------------------------------------------------------------

PATHS = journals("PATH", "Journals, folders of journals, or single segments.")
PATH = journals("PATH", "A journal, or a folder of journals.")
TRACE_PATHS = journals("PATH", "Journals, folders of journals, patterns, or folders that export wrote.")
BLOCK_PATHS = journals("PATH", "Journals of level blocks, or folders of them.")
BLOCK_SIZE = option(
    "--block-size TOKENS",
    "Tokens of a block of a request trace that does not say it. Default: 512.",
    min=0,
)
SESSION = option("--session ID", "Print each turn of this session.", "")
JOURNAL_FOLDER = argument("DIR", "A folder of journals.")
FOLDER = argument("DIR", "The folder to write.")
TEXT = choice("--format text|json|csv", "The output format.")
TABLE = choice("--format table|json|csv", "The output format.")
TEXT_OR_JSON = choice("--format text|json", "The output format.")
VERBOSE = option("--verbose -v", "Print all tables and more findings.")
OUTPUT = option("--output -o FILE", "The file to write; - prints it.", ...)
FORM = option(
    "--form provisioning|sharing", "For Grafana's provisioning, or to import by hand.", "provisioning"
)
BY = option(
    "--by KEY|REGEX",
    "One row per group. KEY: engine, model, hour, outcome, day, 5m, rank, lora, priority, salt, or group "
    "(KVLEDGER_GROUP). REGEX searches request ids; its first group names the row.",
)
COLUMNS = option(
    "--by COLUMNS|REGEX",
    "One row per group. COLUMNS: engine, model, hour, 5m, outcome, rank, lora, priority, salt, group "
    "(KVLEDGER_GROUP), or any column of requests; commas between them. REGEX searches request ids; its first "
    "group names the row.",
)
WHERE = option(
    "--where CONDITION",
    'Only requests for which this SQL condition on their columns is true, such as "rework > 0".',
)
GPU_HOUR = option(
    "--gpu-hour PRICE",
    "Price of an hour of one engine with all its GPUs; adds a column of costs.",
    min=0.0,
)
PYTHON = option("--python RELEASE=INTERPRETER", "The Python of an environment that has a release of vLLM.")
CLOSED_LOOP = option(
    "--closed-loop", "A request that continues an answer comes as long after its end as recorded."
)
