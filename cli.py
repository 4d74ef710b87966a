"""The command line: each command parses its options, calls one function and prints its result.

No logic belongs here, and options are declared in ``cli_options.py``. Everything but typer is imported when a
command needs it, so that ``kvledger --help`` is quick and only ``demo``, ``conformance`` and ``doctor`` need
vLLM. Exit codes are in ``cli_options.py`` and in the README.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from . import __version__
from . import cli_options as opt

CODES = {"clean": 0, "violated": 1, "unknown": 3}
BAD_INPUT = 2
OWN_BUG = 70
INTERRUPTED = 130
READER_GONE = 141
EXTRAS = {
    "analysis": ("duckdb", "pandas", "plotly", "pyarrow"),
    "fleet": ("dask", "distributed", "fsspec"),
    "lmcache": ("lmcache",),
    "routing": ("dynamo",),
    "sign": ("cryptography",),
    "pictures": ("resvg_py",),
    "vllm": ("torch", "vllm"),
    "web": ("bcrypt", "yaml"),
    "whatif": ("libcachesim",),
}
COMPLETE = "_KVLEDGER_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

Function = TypeVar("Function", bound=Callable[..., Any])

app = typer.Typer(
    name="kvledger",
    cls=opt.Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=opt.examples(
        "demo                     # run and audit an engine on this CPU",
        "audit /var/lib/kvledger  # check what live engines wrote there",
        "explain admission        # what a term or an invariant means",
        exit_codes=opt.EXIT_CODES,
    ),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: opt.RENAMED_OPTIONS.get(name, name),
    },
)


def command(panel: str, *examples: str, exit_codes: str = "") -> Callable[[Function], Function]:
    """Register a command in a ``panel`` of the list of commands, with examples at the end of its help."""
    epilog = opt.examples(*examples, exit_codes=exit_codes)
    return app.command(cls=opt.Command, rich_help_panel=panel, epilog=epilog)


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


@command(
    opt.AUDIT,
    "audit /var/lib/kvledger",
    "audit /var/lib/kvledger --since 1h --format json",
    "audit journals --format github  # in a GitHub Actions step",
    exit_codes=f"{opt.AUDIT_CODES}.",
)
def audit(
    paths: opt.JournalPaths,
    verbose: opt.Verbose = False,
    format: opt.AuditFormat = "text",
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Check every account in the journals and print the verdict.

    Prints the verdict, the findings and where prompt tokens came from. As csv: one line per finding. As
    github: annotations for GitHub Actions. As sarif: a SARIF 2.1.0 log.
    """
    from .audit.replay.journals import audit_paths
    from .audit.replay.windows import window
    from .exporters.reports.audit import findings_csv, report
    from .exporters.reports.conclusions import concluded
    from .exporters.reports.costs import costs_of

    tallied, priced = format in ("text", "json"), format == "json" or (format == "text" and verbose)
    with _reading(paths, jobs, dask) as (places, run):
        audited = audit_paths(
            places,
            window=window(since, until),
            with_metrics=False,
            with_costs=tallied,
            times_steps=priced,  # a text without -v prints no seconds
            run=run,
        )
        result = concluded(report(audited, costs_of(audited.engines) if tallied else None))
    if format in ("github", "sarif"):
        from .exporters.reports import annotations

        if format == "github":
            typer.echo(annotations.github(result))
        else:
            _print("json", annotations.sarif(result, annotations.paths_of(audited.engines)), None, None)
        raise typer.Exit(CODES[result.verdict])

    def render(result: Any) -> Any:
        from .exporters.reports import audit_text

        return audit_text.render(result, verbose=verbose)

    _print(format, result, render, findings_csv)
    raise typer.Exit(CODES[result.verdict])


@command(opt.AUDIT, "show /var/lib/kvledger cmpl-4f", "show /var/lib/kvledger cmpl-4f --every")
def show(
    paths: opt.JournalPaths,
    request: opt.RequestId,
    every: opt.EveryEntry = False,
    format: opt.TextFormat = "text",
    json: opt.JsonAlias = False,
    since: opt.Since = "",
    until: opt.Until = "",
) -> None:
    """Print the account statement of one request, or the requests of one call.

    REQUEST is any id that the client knows: the id of the response, the X-Request-Id, a trace id, or the
    engine's own. As csv: one line per entry.
    """
    from .audit.replay.journals import statements
    from .audit.replay.windows import window
    from .exporters.reports import call as call_report
    from .exporters.reports import statement as report
    from .exporters.reports.audit import lines_csv, statement_data

    chosen = window(since, until)
    with _reading(paths, jobs=1) as (places, run):
        found = statements(places, request, window=chosen, run=run)
    if len(found) > 1:
        if json or format == "json":
            _print("json", call_report.data(request, found), None, None)
        else:
            _print(format, found, partial(call_report.render, request), call_report.as_csv)
        return
    account = found[0]
    if json or format == "json":
        _print("json", statement_data(account), None, None)
    else:
        _print(format, account, lambda account: report.render(account, every_entry=every), lines_csv)


@command(
    opt.AUDIT,
    "usage /var/lib/kvledger --log usage.jsonl",
    "usage /var/lib/kvledger --log litellm.jsonl --since 1d --format csv",
    exit_codes=(
        "Exit codes: 0 every call is equal or explained; 1 a difference is unexplained; 2 bad usage or "
        "input; 3 a call is not in the trace or its account is incomplete."
    ),
)
def usage(
    paths: opt.JournalPaths,
    log: opt.UsageLogFile,
    verbose: opt.Verbose = False,
    format: opt.TextFormat = "text",
    since: opt.Since = "",
    until: opt.Until = "",
) -> None:
    """Compare the usage that clients were told with the ledger, call by call.

    The log has one JSON object a line: OpenAI responses, LiteLLM's logging payload, OpenTelemetry spans, or
    Envoy AI Gateway's access log. docs/usage.md says how to write one beside a server.
    """
    from .audit.replay.find import journals_at
    from .audit.replay.windows import window
    from .exporters import usage_logs
    from .exporters.reports import usage as report

    chosen = window(since, until)
    told = usage_logs.read(log)
    with _reading(paths, jobs=1, local=True) as (places, _):
        result = report.usage(journals_at(places), told, chosen)
    if format == "json":
        _print("json", report.data(result, told), None, None)
    else:
        _print(format, result, lambda usage: report.render(usage, told, verbose=verbose), report.as_csv)
    raise typer.Exit(CODES[report.verdict(result)])


@command(
    opt.AUDIT,
    "statement /var/lib/kvledger --month 2026-11 --by group -o november.csv --key private.pem",
    "statement --verify november.csv --public-key public.pem",
    exit_codes="Exit codes: 0 written, or verified; 1 --verify found a change; 2 bad usage or input.",
)
def statement(
    paths: opt.SomeJournalPaths = None,
    month: opt.Month = "",
    by: opt.GroupBy = "",
    format: opt.StatementFormat = "focus-csv",
    output: opt.StatementFile = Path("-"),
    after: opt.PreviousStatement = None,
    key: opt.PrivateKey = None,
    verify: opt.VerifiedStatement = None,
    public_key: opt.PublicKey = None,
) -> None:
    """Write the tokens of a month as billable lines, or verify such a statement.

    Columns are those of FOCUS, with a hash chain over the lines. Requests whose accounts are incomplete are
    counted and not billed.
    """
    from .exporters.billing import run

    if verify is not None:
        if paths:
            raise typer.BadParameter("--verify takes no journals.")
        typer.echo(run.verified(verify, public_key))
        return
    if not paths or not month:
        raise typer.BadParameter("A statement needs journals and --month, or --verify FILE.")
    if key is not None and str(output) == "-":
        raise typer.BadParameter("--key needs -o FILE: the signature is written beside the file.")
    with _reading(paths, jobs=1, local=True) as (places, _):
        text = run.statement(places, month, by, format, after)
    run.write(text, output, key)


@command(
    opt.AUDIT,
    "summary /var/lib/kvledger --by hour",
    "summary /var/lib/kvledger --by '^(tenant-[a-z]+)' --format csv",
)
def summary(
    paths: opt.TracePaths,
    by: opt.Columns = "",
    where: opt.Where = "",
    percentiles: Annotated[
        str,
        typer.Option(
            "--percentiles",
            metavar="COLUMNS",
            show_default=False,
            help="Add the 50th, 95th and 99th percentile of these columns; commas between them.",
        ),
    ] = "",
    gpu_hour: opt.GpuHour = 0.0,
    format: opt.TableFormat = "table",
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Sum up hit rates, rework, preemptions, waiting, and what lost work cost.

    Needs the analysis extra: pip install 'kvledger[analysis]'. docs/tables.md lists the columns.
    """
    from .audit.replay.windows import window
    from .exporters.reports import summary as report

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        rows = report.summarize(
            places,
            by,
            window=chosen,
            run=run,
            with_costs=True,
            gpu_hour=gpu_hour or None,
            where=where,
            percentiles=percentiles,
            group_costs=format != "table",
        )
    _print(format, rows, report.render, report.as_csv)


@command(opt.AUDIT, "why /var/lib/kvledger", "why /var/lib/kvledger --since 1h --format csv")
def why(
    paths: opt.JournalPaths,
    by: opt.Columns = "",
    where: opt.Where = "",
    gpu_hour: opt.GpuHour = 0.0,
    format: opt.TableFormat = "table",
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Explain prefix-cache misses with the causes the trace proves.

    Needs the analysis extra: pip install 'kvledger[analysis]'.
    """
    from .audit.replay.windows import window
    from .exporters.reports import why as report
    from .exporters.reports.conclusions import explained_with

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        found = report.why(places, window=chosen, run=run, gpu_hour=gpu_hour or None, by=by, where=where)
        result = explained_with(found)
    _print(format, result, report.render, report.as_csv)


@command(
    opt.AUDIT,
    'query /var/lib/kvledger "select model, sum(local) / sum(prompt_tokens) from requests group by all"',
    'query /var/lib/kvledger "select * from engines" --format csv',
)
def query(
    paths: opt.TracePaths,
    sql: Annotated[str, typer.Argument(metavar="SELECT", show_default=False, help="One SELECT statement.")],
    format: opt.TableFormat = "table",
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Answer a question in SQL over the rows of requests.

    The tables are requests, causes, activity, findings and engines; docs/tables.md lists their columns and
    has twenty questions with their answers. SQL is DuckDB's. Nothing but these tables can be read, and
    nothing can be written. Needs the analysis extra: pip install 'kvledger[analysis]'.
    """
    from .audit.replay.windows import window
    from .exporters.reports import query as report

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        result = report.ask(places, sql, window=chosen, run=run)
    _print(format, result, report.render, report.as_csv)


@command(
    opt.AUDIT,
    "whatif /var/lib/kvledger",
    "whatif /var/lib/kvledger --blocks 1000,2000 --policy lru,lfu",
    "whatif /var/lib/kvledger --tiers 40GiB,500GiB",
    "whatif conversation_trace.jsonl --skip 0.5",
)
def whatif(
    paths: opt.WhatIfPaths,
    blocks: opt.BlockCounts = "",
    policy: opt.Policies = "lru",
    tiers: opt.Tiers = "",
    block_bytes: opt.BlockBytes = "",
    block_size: opt.BlockTokens = 0,
    skip: opt.Skip = 0.0,
    sample: opt.SampleShare = 1.0,
    by: opt.GroupBy = "",
    output: opt.PageFile = None,
    format: opt.TableFormat = "table",
    json: opt.JsonAlias = False,
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
) -> None:
    """Compute which hits another cache would have had.

    Replays the blocks of a journal of level blocks, or a request trace in the Mooncake format, on caches of
    other sizes, with other policies and with a second tier.
    Needs the whatif extra: pip install 'kvledger[whatif]'.
    """
    from .audit.analysis.whatif import Options
    from .audit.replay.windows import window
    from .exporters.cache_policies import policies
    from .exporters.reports import whatif as report

    options = Options(
        policies=policies(policy),
        blocks=report.counts(blocks),
        tiers=report.sizes(tiers),
        block_bytes=report.size(block_bytes) if block_bytes else 0,
        skip=skip,
    )
    chosen = window(since, until)
    with _reading(paths, jobs) as (places, run):
        result = report.study(
            places,
            options,
            block_tokens=block_size,
            window=chosen,
            run=run,
            by=by,
            share=sample if sample < 1 else None,
        )
    if output is not None and str(output) != "-":
        report.save(result, output)
        typer.echo(f"Wrote {output}; open it in a browser.", err=True)
    if output is not None and str(output) == "-":
        typer.echo(report.html(result))
    else:
        _print("json" if json else format, result, report.render, report.as_csv)


@command(opt.AUDIT, "prefixes /var/lib/kvledger", "prefixes /var/lib/kvledger --top 50 --format csv")
def prefixes(
    paths: opt.BlockJournalPaths,
    top: opt.Top = 20,
    format: opt.TableFormat = "table",
    json: opt.JsonAlias = False,
    jobs: opt.Jobs = 0,
) -> None:
    """List the shared prefixes for which the cache saved and lost most.

    Prefixes are opaque: their labels come from keyed block hashes.
    """
    from .exporters.reports import prefixes as report

    with _reading(paths, jobs) as (places, run):
        result = report.prefixes(places, most=top, run=run)
    _print("json" if json else format, result, report.render, report.as_csv)


@command(opt.AUDIT, "blocks /var/lib/kvledger")
def blocks(
    paths: opt.BlockJournalPaths,
    format: opt.TableFormat = "table",
    json: opt.JsonAlias = False,
    jobs: opt.Jobs = 0,
) -> None:
    """Sum up how blocks were used: states, evictions, lifetimes, reuse."""
    from .exporters.reports import block_use as report

    with _reading(paths, jobs) as (places, run):
        result = report.block_use(places, run=run)
    _print("json" if json else format, result, report.render, report.as_csv)


@command(
    opt.AUDIT,
    "routing /var/lib/kvledger",
    "routing /var/lib/kvledger --index dynamo --format json",
)
def routing(
    paths: opt.BlockJournalPaths,
    index: opt.RouterIndex = "own",
    predictions: opt.PredictionsFile = None,
    verbose: opt.Verbose = False,
    format: opt.TextFormat = "text",
    json: opt.JsonAlias = False,
) -> None:
    """Compare the hits that a router's index promises with what engines had, request by request.

    The KV events that record-events wrote beside the journals are replayed through an index, in the order in
    which they came. Each token that was predicted and not found, or the reverse, has one cause.
    """
    from .audit.replay.find import journals_at
    from .exporters.reports import routing as report

    with _reading(paths, jobs=1, local=True) as (places, _):
        result = report.measured(journals_at(places), index, predictions)
    if json or format == "json":
        _print("json", report.data(result), None, None)
    else:
        _print(format, result, lambda routed: report.render(routed, verbose=verbose), report.as_csv)


@command(opt.AUDIT, "ls /var/lib/kvledger", "ls /var/lib/kvledger --audit")
def ls(
    paths: opt.JournalPaths,
    audit: opt.AuditToo = False,
    format: opt.TableFormat = "table",
    jobs: opt.Jobs = 0,
) -> None:
    """List journals: engines, releases, time ranges, requests, bytes.

    Recordings of KV events have the level "events". Reads the beginning and the end of each journal only;
    --audit replays them for their verdicts.
    """
    from .exporters.reports import listing as report

    with _reading(paths, jobs) as (places, run):
        rows = report.journals(places, audit=audit, run=run)
    _print(format, rows, report.render, report.as_csv)


@command(opt.AUDIT, "compact /var/lib/kvledger")
def compact(
    paths: opt.JournalPaths,
    format: opt.TableFormat = "table",
    jobs: opt.Jobs = 0,
) -> None:
    """Read journals once, and keep their requests as rows of Parquet.

    The rows are in .kvledger-facts beside the journals, by engine and hour; summary, why, report and query
    read them and replay only what came since. Of a journal of level blocks the block trace is kept too, for
    whatif. Run it again to add what was recorded since. The rows stay when the journal is removed.
    Needs the analysis extra: pip install 'kvledger[analysis]'.
    """
    from .exporters.reports import compact as report

    with _reading(paths, jobs, local=True) as (places, run):
        result = report.compact_all(places, run=run)
    _print(format, result, report.render, report.as_csv)


@command(
    opt.AUDIT,
    "prune /var/lib/kvledger --older-than 30d",
    "prune /var/lib/kvledger --most 50GiB --yes",
)
def prune(
    folder: opt.JournalFolder,
    older_than: opt.OlderThan = "",
    most: opt.MostBytes = "",
    yes: opt.Yes = False,
    format: opt.TableFormat = "table",
) -> None:
    """Remove old journals of ended engines; without --yes, list them only.

    Journals of live engines stay. Workers' journals go with those of their engine. Recordings of KV
    events are journals of their own.
    """
    from .audit.replay.windows import window
    from .exporters.reports import listing as report
    from .exporters.reports.whatif import size

    result = report.prune(
        folder,
        before_seconds=window(older_than).since,
        most_bytes=size(most) if most else None,
        remove=yes,
    )
    _print(format, result, report.render_pruned, report.pruned_csv)


@command(opt.AUDIT, "diff journals/before journals/after")
def diff(
    before: opt.Before,
    after: opt.After,
    by: opt.GroupBy = "",
    verbose: opt.VerboseDiff = False,
    format: opt.TableFormat = "table",
    json: opt.JsonAlias = False,
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Compare two traces: figures, findings and their meaning.

    Where the two vLLM releases mean different things by a figure, both meanings are printed.
    """
    from .audit.replay.windows import window
    from .exporters.inputs import journals
    from .exporters.reports import diff as report

    chosen = window(since, until)
    with _reading([before, after], jobs, dask) as (_, run):
        result = report.compare(journals([before]), journals([after]), window=chosen, run=run, by=by)
    text = "json" if json else format
    _print(text, result, lambda result: report.render(result, verbose=verbose), report.as_csv)


@command(opt.AUDIT, "explain", "explain tokens/negative", "explain admission")
def explain(
    name: opt.ExplainedName = "",
) -> None:
    """Explain an invariant, a term or a known fault that kvledger prints."""
    from .exporters.reports import explain as report

    if name:
        typer.echo(report.explanation(name))
    else:
        from .exporters.reports import terminal

        terminal.show(report.listing())


@command(opt.AUDIT, "faults", "faults --vllm 0.18.1", "faults --lmcache 0.3.9 --format csv")
def faults(
    vllm: Annotated[str, typer.Option(metavar="RELEASE", help="A release of vLLM.")] = "",
    lmcache: Annotated[str, typer.Option(metavar="RELEASE", help="A release of LMCache.")] = "",
    format: opt.TextFormat = "text",
) -> None:
    """List the known faults of a vLLM or LMCache release.

    Each with its conditions, the releases that have it and the finding that shows it. Without options: of
    the releases installed here, or of all if there is none. As csv: one line per fault.
    """
    from .audit.entry.doctor_faults import installed
    from .exporters.reports import faults as report

    known = report.faults(vllm, lmcache, {} if vllm or lmcache else installed())
    if format == "json":
        _print("json", report.as_data(known), None, None)
    else:
        _print(format, known, report.render, report.as_csv)


# --- write files ----------------------------------------------------------------------------------------


@command(opt.FILES, "report /var/lib/kvledger -o page.html", exit_codes=f"{opt.AUDIT_CODES}.")
def report(
    paths: opt.JournalPaths,
    output: opt.OutputFile,
    by: opt.GroupBy = "",
    gpu_hour: opt.GpuHour = 0.0,
    svg: opt.SvgFolder = None,
    png: opt.PngFolder = None,
    since: opt.Since = "",
    until: opt.Until = "",
    jobs: opt.Jobs = 0,
    dask: opt.Dask = "",
) -> None:
    """Write one HTML page: the audit, its findings and plots.

    The page loads nothing from the network. The verdict is printed too, on standard error.
    """
    from .audit.replay.windows import window
    from .exporters.reports import audit_text, html_page, pictures, terminal

    chosen = window(since, until)
    with _reading(paths, jobs, dask) as (places, run):
        page = html_page.gather(
            places,
            window=chosen,
            run=run,
            gpu_hour=gpu_hour or None,
            by=by,
        )
    for path in pictures.save(page, svg, png):
        typer.echo(f"Wrote {path}.", err=True)
    if str(output) == "-":
        typer.echo(html_page.html(page))
    else:
        html_page.save(page, output)
        terminal.show(audit_text.answer(page.report), stderr=True)
        typer.echo(f"Wrote {output}; open it in a browser.", err=True)
    raise typer.Exit(CODES[page.report.verdict])


@command(
    opt.FILES,
    "export /var/lib/kvledger -o tables",
    "export /var/lib/kvledger -o tables --table requests --table lives",
    "export /var/lib/kvledger --format openmetrics -o history.om",
)
def export(
    paths: opt.JournalPaths,
    output: opt.OutputFolder,
    table: opt.TableNames = None,
    since: opt.Since = "",
    until: opt.Until = "",
    format: opt.ExportFormat = "parquet",
    interval: opt.ScrapeInterval = "15s",
    label: opt.AddedLabels = None,
) -> None:
    """Write the tables of a trace as Parquet, or its metrics as OpenMetrics.

    The tables are requests, lives, entries, violations and steps, and at level blocks stays and occupancy;
    docs/tables.md lists their columns. They need the analysis extra: pip install 'kvledger[analysis]'.
    With --format openmetrics, -o is a file for `promtool tsdb create-blocks-from openmetrics`, so that boards
    show the past.
    """
    from .audit.errors import LedgerError
    from .audit.replay.windows import duration, window

    if format == "openmetrics":
        from .exporters.metrics import backfill

        added = backfill.labels_of(label or ())
        with _reading(paths, local=True) as (places, _):
            ticks, samples = backfill.export(places, output, duration(interval), added)
        typer.echo(f"{output}: {samples:,} samples at {ticks:,} times", err=True)
        return
    if format != "parquet":
        raise LedgerError(f"{format!r} is neither parquet nor openmetrics.")
    from .exporters.trace import tables
    from .exporters.trace.parquet import export as write_tables

    chosen = window(since, until)
    with _reading(paths, local=True) as (places, _):
        counts = write_tables(places, output, table or tuple(tables.TABLES), chosen)
    for name, count in counts.items():
        typer.echo(f"{output / name}.parquet: {count:,} rows", err=True)


@command(opt.FILES, "timeline /var/lib/kvledger --since 5m -o timeline.json")
def timeline(
    paths: opt.JournalPaths,
    output: opt.OutputFile,
    since: opt.Since = "",
    until: opt.Until = "",
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


@command(
    opt.FILES,
    "repro /var/lib/kvledger",
    "repro /var/lib/kvledger --finding tokens/negative -o test_negative.py --issue bug.md",
    exit_codes="Exit codes: 0 reproduced, and the test fails here; 1 not reproduced; 2 bad usage or input; "
    "3 a reproduction can't show this finding.",
)
def repro(
    path: opt.JournalPath,
    finding: opt.FindingId = "",
    request: opt.FindingRequest = "",
    output: opt.TestFile = Path("test_repro.py"),
    issue: opt.IssueFile = None,
    budget: opt.Budget = "120s",
    python: opt.Interpreter = "",
    any_release: opt.AnyRelease = False,
    json: opt.Json = False,
) -> None:
    """Turn a finding into a small pytest file that fails without kvledger.

    Cuts the journal down, drives the scheduler of the installed vLLM, which must have the journal's release,
    and shrinks the workload while the finding comes back. No prompt, token or request id of the journal is in
    the file. Ctrl-C keeps the smallest workload so far. Needs the vllm extra: pip install 'kvledger[vllm]'.
    """
    from .exporters.reports import repro as report

    _silence_vllm()
    code = report.run(
        path,
        finding=finding,
        request=request,
        output=output,
        issue=issue,
        budget=budget,
        any_release=any_release,
        python=python,
        as_json=json,
    )
    raise typer.Exit(code)


# --- live engines ---------------------------------------------------------------------------------------


@command(
    opt.LIVE,
    "doctor",
    "doctor -v",
    exit_codes="Exit codes: 0 an engine started here would be observed; 1 it would not.",
)
def doctor(
    verbose: opt.VerboseDoctor = False,
    with_import: opt.WithImport = False,
    format: opt.TextFormat = "text",
    json: opt.Json = False,
) -> None:
    """Check whether kvledger can observe the vLLM installed here.

    Reads vLLM's source files, which takes a second. As csv: one line per fact, by topic.
    """
    from .audit.entry.doctor import diagnose
    from .exporters.reports import doctor as report
    from .exporters.reports import terminal

    _silence_vllm()
    diagnosis = diagnose(with_import=with_import, importing=lambda: terminal.spinner("importing vLLM"))
    if json or format == "json":
        _print("json", report.as_data(diagnosis), None, None)
    else:
        _print(format, diagnosis, lambda each: report.render(each, verbose=verbose), report.as_csv)
    raise typer.Exit(0 if diagnosis.observed else 1)


@command(opt.LIVE, "tail /var/lib/kvledger")
def tail(
    path: opt.JournalPath,
    by: opt.GroupBy = "",
    wait: opt.Wait = False,
    format: opt.TextFormat = "text",
) -> None:
    """Follow journals live: totals, rates and the newest findings.

    Prints plain lines where the output is not a terminal; as json one object per line, as csv the totals
    only. Ends when all engines have ended, or with Ctrl-C.
    """
    from .exporters.reports.tail import follow

    follow(path, wait=wait, format=format, by=by)


@command(
    opt.LIVE,
    "record-events /var/lib/kvledger --endpoint tcp://localhost:5557 --replay tcp://localhost:5558",
)
def record_events(
    folder: opt.JournalFolder,
    endpoint: opt.EventsEndpoint = "tcp://localhost:5557",
    replay: opt.EventsReplay = "",
    topic: opt.EventsTopic = "",
) -> None:
    """Record an engine's KV events beside its journal, until it is interrupted.

    The engine publishes them with --kv-events-config. Both processes need the same KVLEDGER_EVENTS_KEY. The
    journal holds keyed hashes, and no token ids. kvledger audit compares it with the engine's blocks.
    """
    import signal
    import threading

    from .exporters.kv_events import record

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    for line in record(folder, endpoint, replay, topic, stop):
        typer.echo(line)


@command(
    opt.LIVE,
    "serve /var/lib/kvledger",
    "serve /var/lib/kvledger --engine-url http://localhost:8000/metrics",
    "serve /var/lib/kvledger --check-config",
)
def serve(
    path: opt.ServedPath,
    address: opt.ListenAddress = "127.0.0.1:9464",
    config: opt.WebConfig = None,
    telemetry_path: opt.TelemetryPath = "/metrics",
    state: opt.StateFolder = None,
    compact: opt.CompactEvery = "",
    engine_url: opt.EngineUrls = None,
    log_level: opt.LogLevel = "info",
    log_format: opt.LogFormat = "text",
    check_config: opt.CheckConfig = False,
) -> None:
    """Follow journals and serve /metrics for Prometheus.

    Every engine under PATH is followed, also engines that start later. The page / lists what is served. A
    restarted server continues from its checkpoint and counts nothing twice.
    """
    from .exporters.sidecar import serve as sidecar
    from .exporters.sidecar.log import Log

    log, urls = Log(log_level, log_format), engine_url or ()
    if check_config:
        sidecar.check_config(
            path,
            address,
            folder=state,
            config=config,
            engine_urls=urls,
            telemetry_path=telemetry_path,
            compact=compact,
        )
        typer.echo("The configuration is valid.")
        return
    sidecar.serve(
        path,
        address,
        log,
        folder=state,
        config=config,
        engine_urls=urls,
        inform=log.info,
        telemetry_path=telemetry_path,
        compact=compact,
    )


@command(opt.LIVE, "deploy compose -o kvledger-compose", "deploy systemd > kvledger.service")
def deploy(
    form: opt.DeployForm,
    output: opt.DeployFolder = None,
) -> None:
    """Print or write the files that run kvledger beside a server.

    The forms are compose, kubernetes (a kustomize component), helm, systemd and containerfile. docs/deploy.md
    explains them.
    """
    from .dashboards import deploy_files

    chosen = deploy_files.form(form)
    if output is None:
        typer.echo(deploy_files.printed(chosen))
        return
    for path in deploy_files.write(chosen, output):
        typer.echo(path)
    typer.echo(f"{chosen.next}.", err=True)


dashboards = typer.Typer(
    name="dashboards",
    cls=opt.Commands,
    no_args_is_help=True,
    help="Write or check Grafana boards and Prometheus rules.",
    epilog=opt.examples("dashboards export boards --form sharing", "dashboards rules rules"),
)
app.add_typer(dashboards, rich_help_panel=opt.LIVE)


@dashboards.command("export", cls=opt.Command, epilog=opt.examples("dashboards export boards --form sharing"))
def export_dashboards(folder: opt.Folder, form: opt.Form = "provisioning") -> None:
    """Write the boards as Grafana JSON."""
    from .dashboards import boards

    for path in boards.write(folder, boards.form(form)):
        typer.echo(path)


@dashboards.command("rules", cls=opt.Command, epilog=opt.examples("dashboards rules rules"))
def export_rules(folder: opt.Folder) -> None:
    """Write the recording and alert rules for Prometheus."""
    from .dashboards import rules

    typer.echo(rules.write(folder))


@dashboards.command(
    "check",
    cls=opt.Command,
    epilog=opt.examples(
        "dashboards check boards",
        "dashboards check --prometheus http://localhost:9090",
        exit_codes="Exit codes: 0 all checks pass; 1 a check fails; 2 bad usage or input.",
    ),
)
def check_dashboards(
    folder: opt.ExportedFolder = None,
    form: opt.Form = "provisioning",
    prometheus: opt.PrometheusUrl = "",
) -> None:
    """Check that panels and rules name only served metrics, and which return data."""
    from .dashboards import boards, check

    result = check.check(folder, boards.form(form), prometheus)
    for line in result.lines:
        typer.echo(line)
    raise typer.Exit(0 if result.passed else 1)


@dashboards.command(
    "preview",
    cls=opt.Command,
    epilog=opt.examples(
        "dashboards preview --prometheus http://localhost:9090 -o boards.html",
        "dashboards preview tokens --prometheus http://localhost:9090 -o tokens.png --since 6h",
    ),
)
def preview_dashboards(
    board: opt.BoardName = None,
    prometheus: opt.DataUrl = "http://localhost:9090",
    output: opt.PreviewFile = Path("boards.html"),
    since: opt.Since = "1h",
    until: opt.Until = "",
    interval: opt.ScrapeInterval = "15s",
    width: opt.PictureWidth = 1440,
) -> None:
    """Draw the boards with the data of a Prometheus, without Grafana.

    The page needs no network; any browser shows it. A picture needs Chromium.
    """
    import time

    from .audit.replay.windows import duration, window
    from .dashboards import preview
    from .dashboards.preview_data import Span

    chosen, now = window(since, until), time.time()
    end = chosen.until or now
    span = Span(end, end - (chosen.since or 0.0), duration(interval))
    preview.save(preview.gather([board] if board else [], prometheus, span), span, output, width)
    typer.echo(output)


# --- engines and connectors to try ----------------------------------------------------------------------


@command(opt.TRY, "demo", "demo --inject negative-local-hit --keep /tmp/tour", exit_codes=opt.EXIT_CODES)
def demo(
    inject: opt.Injection = None,
    verbose: opt.Verbose = False,
    json: opt.Json = False,
    keep: opt.KeptFolder = None,
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


@command(
    opt.TRY,
    "conformance ExampleConnector",
    "conformance MyConnector --module my_connector.py",
    exit_codes="Exit codes: 0 clean; 1 violated, or a situation broke; 2 bad input; 3 unknown.",
)
def conformance(
    connector: opt.ConnectorName,
    module: opt.ConnectorModule = None,
    options: opt.ConnectorOptions = None,
    disaggregated: opt.Disaggregated = False,
    verbose: opt.VerboseCard = False,
    format: opt.CardFormat = "text",
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


@command(
    opt.TRY,
    "bisect test_repro.py --releases 0.17.0..0.33.0",
    "bisect test_repro.py --python 0.23.0=old/bin/python --python 0.24.0=new/bin/python",
    exit_codes="Exit codes: 0 a release fails; 1 none fails; 2 bad usage or input.",
)
def bisect(
    file: opt.ReproFile,
    releases: opt.Releases = "",
    python: opt.Interpreters = None,
    jobs: opt.BisectJobs = 0,
    json: opt.Json = False,
) -> None:
    """Run a test of repro on several vLLM releases: first bad, last bad, first good.

    A checkout of kvledger has environments for the releases (scripts/releases.py builds them). Elsewhere,
    name the interpreters of your own environments.
    """
    from .exporters.reports import bisect as report

    result = report.run(file, releases, python or (), jobs)
    _print("json" if json else "text", report.as_data(result) if json else result, report.render, None)
    raise typer.Exit(0 if result.first_bad else 1)


# --- other ----------------------------------------------------------------------------------------------


@command(opt.OTHER, "completion bash >> ~/.bashrc")
def completion(
    shell: opt.Shell,
) -> None:
    """Print the completion script for your shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SHELLS)}.")
    typer.echo(get_completion_script(prog_name="kvledger", complete_var=COMPLETE, shell=shell))


@command(opt.OTHER)
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# --- what commands share --------------------------------------------------------------------------------


def _reading(paths: list[Path], jobs: int = 0, dask: str = "", *, local: bool = False) -> Any:
    """The journals to read and how to read them, with a progress bar on a terminal."""
    from .exporters.inputs import reading

    return reading(paths, jobs, dask, local=local)


def _print(format: str, result: Any, render: Any, as_csv: Any) -> None:
    """Print a result as text, JSON or CSV."""
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
        name = (error.name or "a module").partition(".")[0]
        extra = next((extra for extra, needs in EXTRAS.items() if name in needs), "")
        sentence = f"This command needs {name}, which is not installed"
        sentence += f"; install it with: pip install 'kvledger[{extra}]'" if extra else ""
        code = BAD_INPUT
    else:
        sentence = f"kvledger itself failed ({type(error).__name__}: {error}); --debug shows where"
        code = OWN_BUG
    sentence = printable(" ".join(sentence.split()))
    if not any(
        word and sentence.startswith(word) for word in ("vLLM", *sys.argv[1:])
    ):  # a path keeps its case
        sentence = sentence[:1].upper() + sentence[1:]
    print(sentence if sentence.endswith((".", "?", "!")) else f"{sentence}.", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
