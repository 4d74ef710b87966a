"""The command line: a verb parses, calls one function and prints. No logic here.

Everything but typer is imported when a verb needs it: ``kvledger --help`` is quick, and no verb
needs vLLM but ``demo``. Exit codes are in :data:`EPILOG` and in the README.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import __version__

CODES = {"clean": 0, "violated": 1, "unknown": 3}
BAD_INPUT = 2
OWN_BUG = 70
EXTRAS = {
    "analysis": ("pandas", "plotly", "pyarrow"),
    "fleet": ("dask", "distributed", "fsspec"),
    "lmcache": ("lmcache",),
    "vllm": ("torch", "vllm"),
    "web": ("bcrypt", "yaml"),
}
INTERRUPTED = 130
COMPLETE = "_KVLEDGER_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
READER_GONE = 141

EPILOG = (
    "Exit codes: 0 clean; 1 violated; 2 bad usage or input; 3 unknown (events are missing) and "
    "nothing violated; 4 the demo's engine did not run; 70 a defect of kvledger."
)

app = typer.Typer(
    name="kvledger",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JournalPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="Journals, folders of journals, or single segments.",
    ),
]
JournalPath = Annotated[
    Path, typer.Argument(metavar="PATH", show_default=False, help="A journal, or a folder of them.")
]
TracePaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="Journals, folders of them, patterns, or folders that export wrote.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonToo = Annotated[bool, typer.Option("--json", hidden=True, help="As --format json.")]
TEXT, TABLE = ("text", "json", "csv"), ("table", "json", "csv")


def _format(*known: str) -> Any:
    """An option of the ``known`` formats, the first of which is for a person."""

    def check(value: str) -> str:
        if value not in known:
            *others, last = known
            raise typer.BadParameter(f"{value!r} is none of {', '.join(others)} and {last}.")
        return value

    return typer.Option(
        "--format", metavar="|".join(known), callback=check, help="For a person or a machine."
    )


Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME",
        show_default=False,
        help="Only requests that ended then or later: ISO, or 15m.",
    ),
]
Until = Annotated[
    str,
    typer.Option(
        "--until", metavar="TIME", show_default=False, help="Only requests that ended before: ISO, or 15m."
    ),
]
Jobs = Annotated[
    int,
    typer.Option("--jobs", "-j", metavar="N", show_default=False, help="Processes. Default: one a core."),
]
Scheduler = Annotated[
    str,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        show_default=False,
        help="Read the journals on the workers of this Dask scheduler.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of whatever goes wrong.")
    ] = False,
) -> None:
    """Audit the KV-cache token accounting of vLLM engines."""


@app.command(epilog=EPILOG)
def audit(
    paths: JournalPaths,
    format: Annotated[str, _format(*TEXT)] = "text",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    scheduler: Scheduler = "",
) -> None:
    """Replay journals; say if the accounts are right.

    As csv: the findings, a line each.
    """
    from .audit.replay.journals import audit_paths
    from .audit.replay.windows import window
    from .exporters.reports.audit import findings_csv, report

    chosen = window(since, until)
    with _reading(paths, jobs, scheduler) as (places, run):
        found = report(audit_paths(places, window=chosen, with_metrics=False, run=run))
    _print(format, found, _drawn, findings_csv)
    raise typer.Exit(CODES[found.verdict])


@app.command()
def show(
    paths: JournalPaths,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            show_default=False,
            help="The request's id, or a beginning of it that no other has.",
        ),
    ],
    every: Annotated[bool, typer.Option("--every", help="Every entry on a line of its own.")] = False,
    format: Annotated[str, _format(*TEXT)] = "text",
    json: JsonToo = False,
    since: Since = "",
    until: Until = "",
) -> None:
    """Print the account statement of one request.

    As csv: its entries, a line each.
    """
    from .audit.replay.journals import statement
    from .audit.replay.windows import window
    from .exporters.reports import statement as drawn
    from .exporters.reports.audit import lines_csv, statement_data

    chosen = window(since, until)
    with _reading(paths, jobs=1) as (places, run):
        found = statement(places, request, window=chosen, run=run)
    if json or format == "json":
        _print("json", statement_data(found), None, None)
    else:
        _print(format, found, lambda found: drawn.statement(found, every_entry=every), lines_csv)


@app.command()
def summary(
    paths: TracePaths,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="engine|model|hour|outcome|REGEX",
            show_default=False,
            help="A row for each; REGEX over request ids, its first group names the row.",
        ),
    ] = "",
    format: Annotated[str, _format(*TABLE)] = "table",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    scheduler: Scheduler = "",
) -> None:
    """Add journals up: hit rates, rework, preemptions, waiting."""
    from .audit.replay.windows import window
    from .exporters.reports import summary as summed

    chosen = window(since, until)
    with _reading(paths, jobs, scheduler) as (places, run):
        rows = summed.summarize(places, by, window=chosen, run=run)
    _print(format, rows, summed.table, summed.as_csv)


@app.command()
def why(
    paths: JournalPaths,
    format: Annotated[str, _format(*TABLE)] = "table",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    scheduler: Scheduler = "",
) -> None:
    """Say why prompt tokens were no hits, as far as it is proved."""
    from .audit.replay.windows import window
    from .exporters.reports import why as explained

    chosen = window(since, until)
    with _reading(paths, jobs, scheduler) as (places, run):
        found = explained.why(places, window=chosen, run=run)
    _print(format, found, explained.drawn, explained.as_csv)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", show_default=False, help="A journal, or a folder.")],
    after: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The other one.")],
    format: Annotated[str, _format(*TABLE)] = "table",
    json: JsonToo = False,
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    scheduler: Scheduler = "",
) -> None:
    """Say what changed from one trace to another, and what their releases mean by a figure."""
    from .audit.replay.windows import window
    from .exporters.inputs import journals
    from .exporters.reports import diff as compared

    chosen = window(since, until)
    with _reading([before, after], jobs, scheduler) as (_, run):
        found = compared.compare(journals([before]), journals([after]), window=chosen, run=run)
    _print("json" if json else format, found, compared.drawn, compared.as_csv)


@app.command()
def report(
    paths: JournalPaths,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="The page to write; - prints."
        ),
    ],
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    scheduler: Scheduler = "",
) -> None:
    """Write one page about a trace, for any browser.

    Everything is in the file; it asks nothing of a network. The exit code is that of audit.
    """
    from .audit.replay.windows import window
    from .exporters.reports import html_page

    chosen = window(since, until)
    with _reading(paths, jobs, scheduler) as (places, run):
        found = html_page.gather(places, window=chosen, run=run)
    if str(output) == "-":
        typer.echo(html_page.html(found))
    else:
        html_page.save(found, output)
        typer.echo(f"{output}: {found.report.verdict}", err=True)
    raise typer.Exit(CODES[found.report.verdict])


@app.command()
def tail(
    path: JournalPath,
    wait: Annotated[
        bool, typer.Option("--wait", help="Go on when all engines have ended: others may come.")
    ] = False,
    format: Annotated[str, _format(*TEXT)] = "text",
) -> None:
    """Follow journals live: totals, rates and the newest findings.

    Plain lines where the output is no terminal; with json an object a line, with csv the totals alone.
    Ends when all engines have ended, or by Ctrl-C.
    """
    from .exporters.reports.tail import follow

    follow(path, wait=wait, format=format)


@app.command()
def export(
    paths: JournalPaths,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The folder to write.")
    ],
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="NAME",
            show_default=False,
            help="Only this one; may be said again. Entries take most time and room.",
        ),
    ] = None,
    since: Since = "",
    until: Until = "",
) -> None:
    """Write a trace's tables as Parquet: requests, lives, entries, violations, steps.

    Needs the analysis extra: pip install 'kvledger[analysis]'. Columns are in docs/tables.md.
    """
    from .audit.replay.windows import window
    from .exporters.trace import tables
    from .exporters.trace.parquet import export as written

    chosen = window(since, until)
    with _reading(paths, local=True) as (places, _):
        counts = written(places, output, table or tuple(tables.TABLES), chosen)
    for name, count in counts.items():
        typer.echo(f"{output / name}.parquet: {count:,} rows", err=True)


@app.command()
def timeline(
    paths: JournalPaths,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="The file to write; - prints."
        ),
    ],
    since: Since = "",
    until: Until = "",
) -> None:
    """Draw a trace for Perfetto or chrome://tracing.

    A track a request, a slice a life, arrows from preemption to resume, counters of requests and
    free blocks. Open the file at https://ui.perfetto.dev.
    """
    from .audit.replay.windows import window
    from .exporters.trace.timeline import save, write_timeline

    chosen = window(since, until)
    with _reading(paths, local=True) as (places, _):
        if str(output) == "-":
            write_timeline(places, sys.stdout, chosen)
            return
        count = save(places, output, chosen)
    typer.echo(f"{output}: {count:,} trace events. Open it at https://ui.perfetto.dev.", err=True)


@app.command()
def explain(
    id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", show_default=False, help="Such as tokens/balance; none lists them all."
        ),
    ] = "",
) -> None:
    """Say what an invariant promises and when it is broken."""
    from .audit.checks.registry import explain as explained

    if id:
        typer.echo(explained(id))
    else:
        from .exporters.reports import terminal

        terminal.show(terminal.catalogue())


@app.command(epilog=EPILOG)
def demo(
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|list",
            show_default=False,
            help="Put an upstream defect back into the engine; list names them. "
            "The exit code is then 0 if the audit names the defect, and 1 if it does not.",
        ),
    ] = None,
    json: Json = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="An empty or new folder for journal, log and result. Default: a temporary one, "
            "which stays too.",
        ),
    ] = None,
) -> None:
    """Run a real vLLM engine on this CPU and audit it.

    A tiny model made on the spot, shared prefixes, too few blocks and a connector on a folder; it
    takes less than a minute. Needs the vllm extra: pip install 'kvledger[vllm]'.
    """
    from .exporters.reports import demo

    if inject == "list":
        demo.show_injections()
        return
    raise typer.Exit(demo.run(inject, keep, as_json=json))


@app.command(epilog="Exit codes: 0 clean; 1 violated, or a row broke; 2 bad input; 3 unknown.")
def conformance(
    connector: Annotated[
        str,
        typer.Argument(metavar="CONNECTOR", show_default=False, help="As in kv_connector."),
    ],
    module: Annotated[
        Path | None,
        typer.Option(metavar="PATH", show_default=False, help="The Python file that has it, if not vLLM."),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            show_default=False,
            help="Its kv_connector_extra_config; {folder} in it is an empty folder, a row each.",
        ),
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="It reads from another engine, not from a store: one prefills what it loads. "
            "Implied for NixlConnector.",
        ),
    ] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="text|json|markdown", help="For a person, a machine, a page.")
    ] = "text",
) -> None:
    """Drive a KV connector through fixed situations on the real scheduler; print its score card.

    Scheduler side and worker side are the connector's own, on the CPU; the model is made up, so that
    the KV that a load brings can be told from what it should be. Needs the vllm extra.
    """
    if format not in ("text", "json", "markdown"):
        raise typer.BadParameter(f"{format!r} is none of text, json and markdown.")
    from .exporters.reports import conformance

    verdict = conformance.run(connector, module, options, format, disaggregated or None)
    raise typer.Exit(CODES[verdict])


@app.command()
def serve(
    path: JournalPath,
    address: Annotated[
        str,
        typer.Option("--web.listen-address", metavar="HOST:PORT", help="Where to listen."),
    ] = "127.0.0.1:9464",
    config: Annotated[
        Path | None,
        typer.Option(
            "--web.config.file",
            metavar="FILE",
            show_default=False,
            help="TLS and users, in the format of Prometheus's exporter-toolkit. "
            "Needs the web extra: pip install 'kvledger[web]'.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Where the checkpoint is kept. Default: .kvledger under PATH.",
        ),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-url",
            metavar="URL",
            show_default=False,
            help="An engine's own /metrics, to stand beside the ledger's. Repeatable.",
        ),
    ] = None,
) -> None:
    """Follow journals; serve /metrics for Prometheus.

    Every engine under PATH, those to come included; / shows what else is served. A restart goes on
    exactly where it was.
    """
    from .exporters.sidecar.serve import serve as serving

    def notify(sentence: str) -> None:
        typer.echo(sentence, err=True)

    serving(path, address, notify, folder=state, config=config, engine_urls=engine_url or ())


@app.command(epilog="Exit codes: 0 an engine here would be observed; 1 it would not.")
def doctor(format: Annotated[str, _format(*TEXT)] = "text", json: JsonToo = False) -> None:
    """Say if an engine here would be observed, and what of it.

    As csv: a line for everything it says, by topic.
    """
    from .audit.entry.doctor import diagnose
    from .exporters.reports import doctor

    found = diagnose()
    if json or format == "json":
        _print("json", doctor.as_data(found), None, None)
    else:
        _print(format, found, doctor.diagnosis, doctor.as_csv)
    raise typer.Exit(0 if found.observed else 1)


dashboards = typer.Typer(
    name="dashboards", no_args_is_help=True, help="Grafana boards and Prometheus rules to import."
)
app.add_typer(dashboards)
Form = Annotated[
    str,
    typer.Option(
        "--form",
        metavar="provisioning|sharing",
        help="For Grafana to read by itself, or for a person to import.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder to write.")]


@dashboards.command("export")
def export_dashboards(folder: Folder, form: Form = "provisioning") -> None:
    """Write the boards as Grafana's JSON."""
    from .dashboards import boards

    for path in boards.write(folder, boards.form(form)):
        typer.echo(path)


@dashboards.command("rules")
def export_rules(folder: Folder) -> None:
    """Write the recording and alert rules for Prometheus."""
    from .dashboards import rules

    typer.echo(rules.write(folder))


@dashboards.command("check", epilog="Exit codes: 0 all is well; 1 something is not; 2 bad usage or input.")
def check_dashboards(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", show_default=False, help="Exported files, to be held against these."),
    ] = None,
    form: Form = "provisioning",
    prometheus: Annotated[
        str, typer.Option("--prometheus", metavar="URL", show_default=False, help="Run every query there.")
    ] = "",
) -> None:
    """Check that panels and rules name only served metrics, and which return data."""
    from .dashboards import boards, check

    found = check.check(folder, boards.form(form), prometheus)
    for line in found.lines:
        typer.echo(line)
    raise typer.Exit(0 if found.passed else 1)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", show_default=False, help="Your shell.")],
) -> None:
    """Print what your shell needs to complete kvledger's words.

    For bash, once: kvledger completion bash >> ~/.bashrc
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SHELLS)}.")
    typer.echo(get_completion_script(prog_name="kvledger", complete_var=COMPLETE, shell=shell))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# --- what verbs share -----------------------------------------------------------------------------------


def _reading(paths: list[Path], jobs: int = 0, scheduler: str = "", *, local: bool = False) -> Any:
    """The journals to read and who reads them, with a bar on a terminal."""
    from .exporters.inputs import reading

    return reading(paths, jobs, scheduler, local=local)


def _drawn(found: Any) -> Any:
    from .exporters.reports import terminal

    return terminal.audit(found)


def _print(format: str, found: Any, drawn: Any, as_csv: Any) -> None:
    """What was found, in one of :data:`TABLE` or :data:`TEXT`."""
    if format == "csv":
        typer.echo(as_csv(found))
    elif format == "json":
        from .exporters.reports.audit import as_json

        typer.echo(as_json(found))
    else:
        from .exporters.reports import terminal

        terminal.show(drawn(found))


# --- how it ends ----------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the command line; whatever goes wrong is one sentence and an exit code."""
    debug = "--debug" in sys.argv[1:]
    if sys.stdout is None:  # closed by who started us, who wants the exit code alone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an id may have what the locale has not
    try:
        words = [word for word in sys.argv[1:] if word != "--debug"]
        if COMPLETE in os.environ:
            from typer.completion import completion_init  # type: ignore[attr-defined]

            completion_init()
        code = app(words, prog_name="kvledger", standalone_mode=False) or 0
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
        code = _tell(error)
    sys.exit(code)


def _reader_gone() -> int:
    """Whoever read our output has gone: say nothing more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _tell(error: Exception) -> int:
    from .audit.errors import LedgerError

    usage = getattr(error, "format_message", None)  # click's errors, whichever click typer uses
    if type(error).__name__ == "NoArgsIsHelpError":
        print(usage() if usage else error)
        return BAD_INPUT
    if isinstance(error, LedgerError):
        sentence, code = str(error), error.exit_code
    elif usage is not None:
        sentence, code = usage(), BAD_INPUT
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        sentence, code = f"The output can't be written: {error.strerror}", BAD_INPUT
    elif isinstance(error, ModuleNotFoundError):
        name = (error.name or "a module").partition(".")[0]
        extra = next((extra for extra, needs in EXTRAS.items() if name in needs), "")
        sentence = f"This command needs {name}, which is not installed"
        sentence += f"; install it with: pip install 'kvledger[{extra}]'" if extra else ""
        code = BAD_INPUT
    else:
        said = f"{type(error).__name__}: {error}"
        sentence = f"kvledger itself failed ({said}); --debug shows where"
        code = OWN_BUG
    sentence = " ".join(sentence.split())
    if not any(word and sentence.startswith(word) for word in sys.argv[1:]):  # a path is left as it is
        sentence = sentence[:1].upper() + sentence[1:]
    print(sentence if sentence.endswith((".", "?", "!")) else f"{sentence}.", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
