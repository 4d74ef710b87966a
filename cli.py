"""The command line: each command parses its options, calls one function and prints its result.

No logic belongs here. Everything but typer is imported when a command needs it, so that ``kvledger --help``
is quick and only ``demo``, ``conformance`` and ``doctor`` need vLLM. Exit codes are in :data:`EXIT_CODES`
and in the README.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__

CODES = {"clean": 0, "violated": 1, "unknown": 3}
BAD_INPUT = 2
OWN_BUG = 70
INTERRUPTED = 130
READER_GONE = 141
EXTRAS = {
    "analysis": ("pandas", "plotly", "pyarrow"),
    "fleet": ("dask", "distributed", "fsspec"),
    "lmcache": ("lmcache",),
    "vllm": ("torch", "vllm"),
    "web": ("bcrypt", "yaml"),
}
COMPLETE = "_KVLEDGER_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

AUDIT_CODES = (
    "Exit codes: 0 clean; 1 violated; 2 bad usage or input; 3 unknown (events are missing) and nothing "
    "violated"
)
EXIT_CODES = f"{AUDIT_CODES}; 4 the demo's engine did not run; 70 a defect of kvledger."
RENAMED_OPTIONS = {"scheduler": "dask"}
"""Old names of options, which still work."""

AUDIT = "Read journals"
FILES = "Write files from journals"
LIVE = "Observe and watch live engines"
TRY = "Try engines and connectors"
OTHER = "Other"


# --- how help is printed --------------------------------------------------------------------------------


class Command(TyperCommand):
    """A command whose help names its arguments without their Python types."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = param.param_type_name
                name = param.metavar if kind == "argument" and param.metavar else record[0]
                rows[kind].append((name, record[1]))
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows[kind]:
                with formatter.section(heading):
                    formatter.write_dl(rows[kind])


class Commands(TyperGroup):
    """Commands listed by panel, each with the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel, in the order in which panels first appear."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sentence = " ".join((command.help or "").partition("\n\n")[0].split())
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name, sentence))
        width = max(len(name) for rows in panels.values() for name, _ in rows)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in rows])


def _examples(*lines: str, exit_codes: str = "") -> str:
    """The end of a command's help. ``\\b`` keeps the lines below it as they are."""
    examples = "\n".join(("\b\nExamples:", *(f"  kvledger {line}" for line in lines)))
    return f"{examples}\n\n{exit_codes}" if exit_codes else examples


app = typer.Typer(
    name="kvledger",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=_examples(
        "demo                     # run and audit an engine on this CPU",
        "audit /var/lib/kvledger  # check what live engines wrote there",
        "explain admission        # what a term or an invariant means",
        exit_codes=EXIT_CODES,
    ),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: RENAMED_OPTIONS.get(name, name),
    },
)


# --- arguments and options that commands share ----------------------------------------------------------

TEXT, TABLE = ("text", "json", "csv"), ("table", "json", "csv")


def _format(*formats: str) -> Any:
    """The option --format; the first of ``formats`` is for a person."""

    def check(value: str) -> str:
        if value not in formats:
            *others, last = formats
            raise typer.BadParameter(f"{value!r} is none of {', '.join(others)} and {last}.")
        return value

    return typer.Option("--format", metavar="|".join(formats), callback=check, help="The output format.")


JournalPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH", show_default=False, help="Journals, folders of journals, or single segments."
    ),
]
JournalPath = Annotated[
    Path, typer.Argument(metavar="PATH", show_default=False, help="A journal, or a folder of journals.")
]
TracePaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="Journals, folders of journals, patterns, or folders that export wrote.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonAlias = Annotated[bool, typer.Option("--json", hidden=True, help="The same as --format json.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all tables and more findings.")]
Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME",
        show_default=False,
        help="Only requests that ended at TIME or later: an ISO time, or an age such as 15m.",
    ),
]
Until = Annotated[
    str,
    typer.Option("--until", metavar="TIME", show_default=False, help="Only requests that ended before TIME."),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", metavar="N", show_default=False, help="Number of processes. Default: one per core."
    ),
]
Dask = Annotated[
    str,
    typer.Option(
        "--dask",
        metavar="ADDRESS",
        show_default=False,
        help="Read the journals on the workers of the Dask scheduler at ADDRESS.",
    ),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", show_default=False, help="The file to write; - prints it."
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
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Audit the KV-cache token accounting of vLLM engines."""


# --- read journals --------------------------------------------------------------------------------------


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples(
        "audit /var/lib/kvledger",
        "audit /var/lib/kvledger --since 1h --format json",
        exit_codes=f"{AUDIT_CODES}.",
    ),
)
def audit(
    paths: JournalPaths,
    verbose: Verbose = False,
    format: Annotated[str, _format(*TEXT)] = "text",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    dask: Dask = "",
) -> None:
    """Check every account in the journals and print the verdict.

    Prints the verdict, the findings and where prompt tokens came from. As csv: one line per finding.
    """
    from .audit.replay.journals import audit_paths
    from .audit.replay.windows import window
    from .exporters.reports.audit import findings_csv, report

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        result = report(audit_paths(places, window=chosen, with_metrics=False, run=run))

    def render(result: Any) -> Any:
        from .exporters.reports import audit_text

        return audit_text.render(result, verbose=verbose)

    _print(format, result, render, findings_csv)
    raise typer.Exit(CODES[result.verdict])


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples("show /var/lib/kvledger cmpl-4f", "show /var/lib/kvledger cmpl-4f --every"),
)
def show(
    paths: JournalPaths,
    request: Annotated[
        str,
        typer.Argument(metavar="REQUEST", show_default=False, help="A request id or a unique prefix."),
    ],
    every: Annotated[
        bool, typer.Option("--every", help="Print each entry; do not fold repeated entries.")
    ] = False,
    format: Annotated[str, _format(*TEXT)] = "text",
    json: JsonAlias = False,
    since: Since = "",
    until: Until = "",
) -> None:
    """Print the account statement of one request.

    As csv: one line per entry.
    """
    from .audit.replay.journals import statement
    from .audit.replay.windows import window
    from .exporters.reports import statement as report
    from .exporters.reports.audit import lines_csv, statement_data

    chosen = window(since, until)
    with _reading(paths, jobs=1) as (places, run):
        account = statement(places, request, window=chosen, run=run)
    if json or format == "json":
        _print("json", statement_data(account), None, None)
    else:
        _print(format, account, lambda account: report.render(account, every_entry=every), lines_csv)


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples(
        "summary /var/lib/kvledger --by hour",
        "summary /var/lib/kvledger --by '^(tenant-[a-z]+)' --format csv",
    ),
)
def summary(
    paths: TracePaths,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="engine|model|hour|outcome|REGEX",
            show_default=False,
            help="One row per group. REGEX searches request ids; its first group names the row.",
        ),
    ] = "",
    format: Annotated[str, _format(*TABLE)] = "table",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    dask: Dask = "",
) -> None:
    """Sum up hit rates, rework, preemptions and waiting."""
    from .audit.replay.windows import window
    from .exporters.reports import summary as report

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        rows = report.summarize(places, by, window=chosen, run=run)
    _print(format, rows, report.render, report.as_csv)


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples("why /var/lib/kvledger", "why /var/lib/kvledger --since 1h --format csv"),
)
def why(
    paths: JournalPaths,
    format: Annotated[str, _format(*TABLE)] = "table",
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    dask: Dask = "",
) -> None:
    """Explain prefix-cache misses with the causes the trace proves."""
    from .audit.replay.windows import window
    from .exporters.reports import why as report

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        result = report.why(places, window=chosen, run=run)
    _print(format, result, report.render, report.as_csv)


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples("diff journals/before journals/after"),
)
def diff(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", show_default=False, help="A journal, or a folder of journals.")
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", show_default=False, help="The one to compare.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print figures that did not change too.")
    ] = False,
    format: Annotated[str, _format(*TABLE)] = "table",
    json: JsonAlias = False,
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    dask: Dask = "",
) -> None:
    """Compare two traces: figures, findings and their meaning.

    Where the two vLLM releases mean different things by a figure, both meanings are printed.
    """
    from .audit.replay.windows import window
    from .exporters.inputs import journals
    from .exporters.reports import diff as report

    chosen = window(since, until)
    with _reading([before, after], jobs, dask) as (_, run):
        result = report.compare(journals([before]), journals([after]), window=chosen, run=run)
    text = "json" if json else format
    _print(text, result, lambda result: report.render(result, verbose=verbose), report.as_csv)


@app.command(
    cls=Command,
    rich_help_panel=AUDIT,
    epilog=_examples("explain", "explain tokens/negative", "explain admission"),
)
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            show_default=False,
            help="An invariant such as tokens/balance, or a term such as life. Without it: list both.",
        ),
    ] = "",
) -> None:
    """Explain an invariant or a term that kvledger prints."""
    from .exporters.reports import explain as report

    if name:
        typer.echo(report.explanation(name))
    else:
        from .exporters.reports import terminal

        terminal.show(report.listing())


# --- write files ----------------------------------------------------------------------------------------


@app.command(
    cls=Command,
    rich_help_panel=FILES,
    epilog=_examples("report /var/lib/kvledger -o page.html", exit_codes=f"{AUDIT_CODES}."),
)
def report(
    paths: JournalPaths,
    output: OutputFile,
    since: Since = "",
    until: Until = "",
    jobs: Jobs = 0,
    dask: Dask = "",
) -> None:
    """Write one HTML page: the audit, its findings and plots.

    The page loads nothing from the network. The verdict is printed too, on standard error.
    """
    from .audit.replay.windows import window
    from .exporters.reports import audit_text, html_page, terminal

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        page = html_page.gather(places, window=chosen, run=run)
    if str(output) == "-":
        typer.echo(html_page.html(page))
    else:
        html_page.save(page, output)
        terminal.show(audit_text.answer(page.report), f"Wrote {output}; open it in a browser.", stderr=True)
    raise typer.Exit(CODES[page.report.verdict])


@app.command(
    cls=Command,
    rich_help_panel=FILES,
    epilog=_examples(
        "export /var/lib/kvledger -o tables",
        "export /var/lib/kvledger -o tables --table requests --table lives",
    ),
)
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
            help="Write only this table. Repeatable. The table of entries takes most time and space.",
        ),
    ] = None,
    since: Since = "",
    until: Until = "",
) -> None:
    """Write the tables of a trace as Parquet files.

    The tables are requests, lives, entries, violations and steps; docs/tables.md lists their columns.
    Needs the analysis extra: pip install 'kvledger[analysis]'.
    """
    from .audit.replay.windows import window
    from .exporters.trace import tables
    from .exporters.trace.parquet import export as write_tables

    chosen = window(since, until)
    with _reading(paths, local=True) as (places, _):
        counts = write_tables(places, output, table or tuple(tables.TABLES), chosen)
    for name, count in counts.items():
        typer.echo(f"{output / name}.parquet: {count:,} rows", err=True)


@app.command(
    cls=Command,
    rich_help_panel=FILES,
    epilog=_examples("timeline /var/lib/kvledger --since 5m -o timeline.json"),
)
def timeline(
    paths: JournalPaths,
    output: OutputFile,
    since: Since = "",
    until: Until = "",
) -> None:
    """Write a timeline for Perfetto or chrome://tracing.

    It has one track per request, one slice per life, arrows from preemption to resumption, and counters of
    requests and free blocks. Open the file at https://ui.perfetto.dev.
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


# --- live engines ---------------------------------------------------------------------------------------


@app.command(
    cls=Command,
    rich_help_panel=LIVE,
    epilog=_examples(
        "doctor",
        "doctor -v",
        exit_codes="Exit codes: 0 an engine started here would be observed; 1 it would not.",
    ),
)
def doctor(
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print what figures mean, what is not checked, and connectors."),
    ] = False,
    format: Annotated[str, _format(*TEXT)] = "text",
    json: JsonAlias = False,
) -> None:
    """Check whether kvledger can observe the vLLM installed here.

    As csv: one line per fact, by topic.
    """
    from .audit.entry.doctor import diagnose
    from .exporters.reports import doctor as report

    _silence_vllm()
    diagnosis = diagnose()
    if json or format == "json":
        _print("json", report.as_data(diagnosis), None, None)
    else:
        _print(format, diagnosis, lambda each: report.render(each, verbose=verbose), report.as_csv)
    raise typer.Exit(0 if diagnosis.observed else 1)


@app.command(cls=Command, rich_help_panel=LIVE, epilog=_examples("tail /var/lib/kvledger"))
def tail(
    path: JournalPath,
    wait: Annotated[
        bool, typer.Option("--wait", help="Keep waiting for new engines after all engines have ended.")
    ] = False,
    format: Annotated[str, _format(*TEXT)] = "text",
) -> None:
    """Follow journals live: totals, rates and the newest findings.

    Prints plain lines where the output is not a terminal; as json one object per line, as csv the totals
    only. Ends when all engines have ended, or with Ctrl-C.
    """
    from .exporters.reports.tail import follow

    follow(path, wait=wait, format=format)


@app.command(
    cls=Command,
    rich_help_panel=LIVE,
    epilog=_examples(
        "serve /var/lib/kvledger",
        "serve /var/lib/kvledger --engine-url http://localhost:8000/metrics",
    ),
)
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
            help="The folder of the checkpoint. Default: .kvledger under PATH.",
        ),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-url",
            metavar="URL",
            show_default=False,
            help="An engine's own /metrics, to compare with the ledger. Repeatable.",
        ),
    ] = None,
) -> None:
    """Follow journals and serve /metrics for Prometheus.

    Every engine under PATH is followed, also engines that start later. The page / lists what is served. A
    restarted server continues from its checkpoint and counts nothing twice.
    """
    from .exporters.sidecar.serve import serve as serving

    def notify(sentence: str) -> None:
        typer.echo(sentence, err=True)

    serving(path, address, notify, folder=state, config=config, engine_urls=engine_url or ())


dashboards = typer.Typer(
    name="dashboards",
    cls=Commands,
    no_args_is_help=True,
    help="Write or check Grafana boards and Prometheus rules.",
    epilog=_examples("dashboards export boards --form sharing", "dashboards rules rules"),
)
app.add_typer(dashboards, rich_help_panel=LIVE)
Form = Annotated[
    str,
    typer.Option(
        "--form",
        metavar="provisioning|sharing",
        help="For Grafana's provisioning, or to import by hand.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder to write.")]


@dashboards.command("export", cls=Command, epilog=_examples("dashboards export boards --form sharing"))
def export_dashboards(folder: Folder, form: Form = "provisioning") -> None:
    """Write the boards as Grafana JSON."""
    from .dashboards import boards

    for path in boards.write(folder, boards.form(form)):
        typer.echo(path)


@dashboards.command("rules", cls=Command, epilog=_examples("dashboards rules rules"))
def export_rules(folder: Folder) -> None:
    """Write the recording and alert rules for Prometheus."""
    from .dashboards import rules

    typer.echo(rules.write(folder))


@dashboards.command(
    "check",
    cls=Command,
    epilog=_examples(
        "dashboards check boards",
        "dashboards check --prometheus http://localhost:9090",
        exit_codes="Exit codes: 0 all checks pass; 1 a check fails; 2 bad usage or input.",
    ),
)
def check_dashboards(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", show_default=False, help="Exported files, to compare with those of this version."
        ),
    ] = None,
    form: Form = "provisioning",
    prometheus: Annotated[
        str, typer.Option("--prometheus", metavar="URL", show_default=False, help="Run every query there.")
    ] = "",
) -> None:
    """Check that panels and rules name only served metrics, and which return data."""
    from .dashboards import boards, check

    result = check.check(folder, boards.form(form), prometheus)
    for line in result.lines:
        typer.echo(line)
    raise typer.Exit(0 if result.passed else 1)


# --- engines and connectors to try ----------------------------------------------------------------------


@app.command(
    cls=Command,
    rich_help_panel=TRY,
    epilog=_examples("demo", "demo --inject negative-local-hit --keep /tmp/tour", exit_codes=EXIT_CODES),
)
def demo(
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|list",
            show_default=False,
            help="Put a defect of a released version back into the engine; list names the defects. The exit "
            "code is then 0 if the audit finds the defect, and 1 if it does not.",
        ),
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="An empty or new folder for journal, log and result. Default: a temporary folder, "
            "which is not removed.",
        ),
    ] = None,
) -> None:
    """Run a real vLLM engine on this CPU and audit it.

    The engine serves a tiny generated model, with shared prefixes, too few blocks and a connector that
    stores KV in a folder. It takes less than a minute. Needs the vllm extra: pip install 'kvledger[vllm]'.
    """
    from .exporters.reports import demo as report

    if inject == "list":
        report.show_injections()
        return
    raise typer.Exit(report.run(inject, keep, as_json=json, verbose=verbose))


@app.command(
    cls=Command,
    rich_help_panel=TRY,
    epilog=_examples(
        "conformance ExampleConnector",
        "conformance MyConnector --module my_connector.py",
        exit_codes="Exit codes: 0 clean; 1 violated, or a situation broke; 2 bad input; 3 unknown.",
    ),
)
def conformance(
    connector: Annotated[
        str,
        typer.Argument(metavar="CONNECTOR", show_default=False, help="The name, as in kv_connector."),
    ],
    module: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", show_default=False, help="The Python file of a connector that is not vLLM's."
        ),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            show_default=False,
            help="Its kv_connector_extra_config. {folder} in it becomes an empty folder per situation.",
        ),
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="The connector reads from another engine, not from a store: one prefills what it loads. "
            "Implied for NixlConnector.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List clean situations too, and print vLLM's log.")
    ] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="text|json|markdown", help="The output format.")
    ] = "text",
) -> None:
    """Drive a KV connector through a fixed scenario and score it.

    The real scheduler and the connector's own scheduler side and worker side run on the CPU. The model is
    generated, so that loaded KV can be compared with the KV that it should be. Needs the vllm extra.
    """
    if format not in ("text", "json", "markdown"):
        raise typer.BadParameter(f"{format!r} is none of text, json and markdown.")
    from .exporters.reports import conformance as report

    if not verbose:
        _silence_vllm()
    verdict = report.run(connector, module, options, format, disaggregated or None, verbose=verbose)
    raise typer.Exit(CODES[verdict])


# --- other ----------------------------------------------------------------------------------------------


@app.command(cls=Command, rich_help_panel=OTHER, epilog=_examples("completion bash >> ~/.bashrc"))
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", show_default=False, help="Your shell.")],
) -> None:
    """Print the completion script for your shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SHELLS)}.")
    typer.echo(get_completion_script(prog_name="kvledger", complete_var=COMPLETE, shell=shell))


@app.command(cls=Command, rich_help_panel=OTHER)
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# --- what commands share --------------------------------------------------------------------------------


def _reading(paths: list[Path], jobs: int = 0, dask: str = "", *, local: bool = False) -> Any:
    """The journals to read and how to read them, with a progress bar on a terminal."""
    from .exporters.inputs import reading

    return reading(paths, jobs, dask, local=local)


def _print(format: str, result: Any, render: Any, as_csv: Any) -> None:
    """Print a result in one of the formats of :data:`TABLE` or :data:`TEXT`."""
    if format == "csv":
        typer.echo(as_csv(result))
    elif format == "json":
        from .exporters.reports.audit import as_json

        typer.echo(as_json(result))
    else:
        from .exporters.reports import terminal

        terminal.show(render(result))


def _silence_vllm() -> None:
    """Keep vLLM's start-up log out of the answer, unless the user chose a log level."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # vLLM leaves it alone where VLLM_CONFIGURE_LOGGING is 0


# --- how it ends ----------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the command line; an error becomes one sentence on standard error and an exit code."""
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
        code = _print_error(error)
    sys.exit(code)


def _reader_gone() -> int:
    """The reader of our output closed the pipe: write nothing more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _print_error(error: Exception) -> int:
    """Print one sentence on standard error and return the exit code."""
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
        sentence = f"kvledger itself failed ({type(error).__name__}: {error}); --debug shows where"
        code = OWN_BUG
    sentence = " ".join(sentence.split())
    if not any(word and sentence.startswith(word) for word in sys.argv[1:]):  # a path keeps its case
        sentence = sentence[:1].upper() + sentence[1:]
    print(sentence if sentence.endswith((".", "?", "!")) else f"{sentence}.", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
