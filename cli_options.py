"""The arguments and options of the commands, and how help is laid out.

Not here: the commands themselves, which are in ``cli.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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


def examples(*lines: str, exit_codes: str = "") -> str:
    """The end of a command's help. ``\\b`` keeps the line breaks of the examples."""
    if not lines:
        return exit_codes
    examples = "\n".join(("\b\nExamples:", *(f"  kvledger {line}" for line in lines)))
    return f"{examples}\n\n{exit_codes}" if exit_codes else examples


# --- arguments and options ------------------------------------------------------------------------------


def _choice(name: str, help: str, choices: tuple[str, ...], **more: Any) -> Any:
    """The option ``name``, which takes one of ``choices``."""

    def check(value: str) -> str:
        if value not in choices:
            *others, last = choices
            raise typer.BadParameter(f"{value!r} is none of {', '.join(others)} and {last}.")
        return value

    return typer.Option(name, metavar="|".join(choices), callback=check, help=help, **more)


def _format_option(*formats: str) -> Any:
    """The option --format; the first of ``formats`` is for a person."""
    return _choice("--format", "The output format.", formats)


TextFormat = Annotated[str, _format_option("text", "json", "csv")]
AuditFormat = Annotated[str, _format_option("text", "json", "csv", "github", "sarif")]
TableFormat = Annotated[str, _format_option("table", "json", "csv")]
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
SomeJournalPaths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[PATH...]", show_default=False, help="Journals, folders of journals, or single segments."
    ),
]
StatementFormat = Annotated[str, _format_option("focus-csv", "json")]
Month = Annotated[
    str,
    typer.Option(
        "--month", metavar="YYYY-MM", show_default=False, help="Requests that ended in this month, in UTC."
    ),
]
StatementFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; - prints it.")
]
PreviousStatement = Annotated[
    Path | None,
    typer.Option(
        "--after", metavar="FILE", show_default=False, help="The statement before: continue its hash chain."
    ),
]
PrivateKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="PEM",
        show_default=False,
        help="Sign the end of the chain with this Ed25519 key; the signature is written to FILE.sig.",
    ),
]
PublicKey = Annotated[
    Path | None,
    typer.Option(
        "--public-key", metavar="PEM", show_default=False, help="--verify: the signature must be by this key."
    ),
]
VerifiedStatement = Annotated[
    Path | None,
    typer.Option("--verify", metavar="FILE", show_default=False, help="Check this statement."),
]
UsageLogFile = Annotated[
    Path,
    typer.Option(
        "--log", metavar="FILE", show_default=False, help="What clients were told: one JSON object a line."
    ),
]
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
SvgFolder = Annotated[
    Path | None,
    typer.Option("--svg", metavar="DIR", show_default=False, help="Write each chart as SVG into DIR too."),
]
PngFolder = Annotated[
    Path | None,
    typer.Option(
        "--png",
        metavar="DIR",
        show_default=False,
        help="Write each chart as PNG into DIR too; needs the pictures extra: pip install "
        "'kvledger[pictures]'.",
    ),
]
RequestId = Annotated[
    str,
    typer.Argument(metavar="REQUEST", show_default=False, help="A request id or a unique prefix."),
]
EveryEntry = Annotated[bool, typer.Option("--every", help="Print each entry; do not fold repeated entries.")]
GroupBy = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="KEY|REGEX",
        show_default=False,
        help="One row per group. KEY: engine, model, hour, outcome, 5m, rank, lora, priority, salt, or group "
        "(KVLEDGER_GROUP). REGEX searches request ids; its first group names the row.",
    ),
]
Columns = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="COLUMNS|REGEX",
        show_default=False,
        help="One row per group. COLUMNS: engine, model, hour, 5m, outcome, rank, lora, priority, salt, "
        "group (KVLEDGER_GROUP), or any column of requests; commas between them. REGEX searches request ids; "
        "its first group names the row.",
    ),
]
Where = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        show_default=False,
        help='Only requests for which this SQL condition on their columns is true, such as "rework > 0".',
    ),
]
GpuHour = Annotated[
    float,
    typer.Option(
        "--gpu-hour",
        metavar="PRICE",
        min=0.0,
        show_default=False,
        help="Price of an hour of one engine with all its GPUs; adds a column of costs.",
    ),
]
WhatIfPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="Journals of level blocks, folders of journals, or request traces (.jsonl, .jsonl.gz).",
    ),
]
BlockJournalPaths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", show_default=False, help="Journals of level blocks, or folders of them."),
]
JournalFolder = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="A folder of journals.")
]
RouterIndex = Annotated[
    str,
    _choice(
        "--index",
        "The index that KV events are replayed through: our own, one that knows tokens and no salts or "
        "adapters, or Dynamo's RadixTree (the routing extra).",
        ("own", "tokens", "dynamo"),
    ),
]
PredictionsFile = Annotated[
    Path | None,
    typer.Option(
        "--predictions",
        metavar="FILE",
        show_default=False,
        help="What a router itself predicted, in place of an index: lines of JSON as "
        '{"request": ID, "predicted": {PORT: TOKENS}}, PORT being that of the engine\'s KV events.',
    ),
]
EventsEndpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="ADDRESS",
        help="The publisher's address: endpoint of --kv-events-config, with the engine's host.",
    ),
]
EventsReplay = Annotated[
    str,
    typer.Option(
        "--replay",
        metavar="ADDRESS",
        show_default=False,
        help="Where the publisher repeats missed batches: replay_endpoint of --kv-events-config.",
    ),
]
EventsTopic = Annotated[
    str, typer.Option("--topic", metavar="TEXT", show_default=False, help="Only batches of this topic.")
]
AuditToo = Annotated[bool, typer.Option("--audit", help="Replay the journals and print their verdicts.")]
OlderThan = Annotated[
    str,
    typer.Option(
        "--older-than",
        metavar="AGE",
        show_default=False,
        help="Journals that ended longer ago: 30d, or before an ISO time.",
    ),
]
MostBytes = Annotated[
    str,
    typer.Option(
        "--most",
        metavar="SIZE",
        show_default=False,
        help="The oldest journals, until the rest takes SIZE at most: 50GiB.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Remove them.")]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="How many prefixes to list.")]
BlockCounts = Annotated[
    str,
    typer.Option(
        "--blocks",
        metavar="N,N,...",
        show_default=False,
        help="Pool sizes to replay. Default: from a quarter of the recorded size until more gains nothing.",
    ),
]
Policies = Annotated[
    str,
    typer.Option("--policy", metavar="NAME,...", help="Eviction policies: lru, fifo, lfu, clock, sieve."),
]
Tiers = Annotated[
    str,
    typer.Option(
        "--tiers", metavar="SIZE,...", show_default=False, help="Sizes of a second tier: 40GiB,500GiB."
    ),
]
BlockBytes = Annotated[
    str,
    typer.Option(
        "--block-bytes",
        metavar="SIZE",
        show_default=False,
        help="Size of one block on all workers. Default: what the engine reported.",
    ),
]
BlockTokens = Annotated[
    int,
    typer.Option(
        "--block-size",
        metavar="TOKENS",
        min=0,
        show_default=False,
        help="Tokens of a block of a request trace that does not say it. Default: 512.",
    ),
]
Skip = Annotated[
    float,
    typer.Option(
        "--skip",
        metavar="SHARE",
        min=0.0,
        max=0.99,
        show_default=False,
        help="Leave out the hits of this share of the requests at the beginning, where the cache is cold.",
    ),
]
SampleShare = Annotated[
    float,
    typer.Option(
        "--sample",
        metavar="SHARE",
        min=0.0001,
        max=1.0,
        show_default=False,
        help="Replay this share of the blocks, such as 0.01, and estimate the rest; the error is printed.",
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        show_default=False,
        help="Also write an HTML page; - prints it only.",
    ),
]
Before = Annotated[
    Path, typer.Argument(metavar="BEFORE", show_default=False, help="A journal, or a folder of journals.")
]
After = Annotated[Path, typer.Argument(metavar="AFTER", show_default=False, help="The one to compare.")]
VerboseDiff = Annotated[bool, typer.Option("--verbose", "-v", help="Print figures that did not change too.")]
ExplainedName = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        show_default=False,
        help="An invariant such as tokens/balance, a term such as life, or a fault. Without it: a list.",
    ),
]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The folder to write.")
]
TableNames = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="NAME",
        show_default=False,
        help="Write only this table. Repeatable. The table of entries takes most time and space.",
    ),
]
VerboseDoctor = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print what figures mean, what is not checked, and connectors."),
]
WithImport = Annotated[
    bool,
    typer.Option("--import", help="Import vLLM too, which takes longer: does the installation work?"),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Keep waiting for new engines after all engines have ended.")
]
ServedPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        envvar="KVLEDGER_DIR",
        help="A journal, a folder of journals, or a folder with one for each host.",
    ),
]
ListenAddress = Annotated[
    str,
    typer.Option(
        "--web.listen-address",
        metavar="HOST:PORT",
        envvar="KVLEDGER_WEB_LISTEN_ADDRESS",
        help="Where to listen.",
    ),
]
TelemetryPath = Annotated[
    str,
    typer.Option(
        "--web.telemetry-path",
        metavar="PATH",
        envvar="KVLEDGER_WEB_TELEMETRY_PATH",
        help="The path of the metrics.",
    ),
]
LogLevel = Annotated[
    str,
    _choice(
        "--log.level",
        "The least severe lines to log.",
        ("debug", "info", "warn", "error"),
        envvar="KVLEDGER_LOG_LEVEL",
    ),
]
LogFormat = Annotated[
    str,
    _choice(
        "--log.format", "The form of log lines.", ("text", "logfmt", "json"), envvar="KVLEDGER_LOG_FORMAT"
    ),
]
CheckConfig = Annotated[
    bool, typer.Option("--check-config", help="Check options and files, then exit: 0 valid, 2 not.")
]
WebConfig = Annotated[
    Path | None,
    typer.Option(
        "--web.config.file",
        metavar="FILE",
        show_default=False,
        envvar="KVLEDGER_WEB_CONFIG_FILE",
        help="TLS and users, in the format of Prometheus's exporter-toolkit. "
        "Needs the web extra: pip install 'kvledger[web]'.",
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        envvar="KVLEDGER_STATE",
        help="The folder of the checkpoint. Default: .kvledger under PATH.",
    ),
]
CompactEvery = Annotated[
    str,
    typer.Option(
        "--compact",
        metavar="AGE",
        show_default=False,
        envvar="KVLEDGER_COMPACT",
        help="Run kvledger compact on the journals at this interval, such as 1h.",
    ),
]
EngineUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url",
        metavar="URL",
        show_default=False,
        envvar="KVLEDGER_ENGINE_URL",
        help="An engine's own /metrics, to compare with the ledger. Repeatable.",
    ),
]
BoardName = Annotated[
    str | None,
    typer.Argument(metavar="BOARD", show_default=False, help="trust, tokens or compare. Without it: all."),
]
DataUrl = Annotated[str, typer.Option("--prometheus", metavar="URL", help="The Prometheus with the data.")]
PreviewFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="A page, or with the suffix .png a picture.")
]
ExportFormat = Annotated[str, typer.Option(metavar="FORMAT", help="parquet or openmetrics.")]
AddedLabels = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        show_default=False,
        help="A label of every sample. Repeatable; job and instance have the value kvledger without it.",
    ),
]
ScrapeInterval = Annotated[
    str, typer.Option(metavar="TIME", help="Seconds between two scrapes or samples, such as 15s.")
]
PictureWidth = Annotated[int, typer.Option(metavar="PIXELS", min=400, max=4000, help="Width of a picture.")]
DeployForm = Annotated[
    str,
    typer.Argument(
        metavar="FORM", show_default=False, help="compose, kubernetes, helm, systemd or containerfile."
    ),
]
DeployFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        show_default=False,
        help="The folder to write; files in it are not replaced. Without it: print.",
    ),
]
ExportedFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]", show_default=False, help="Exported files, to compare with those of this version."
    ),
]
PrometheusUrl = Annotated[
    str, typer.Option("--prometheus", metavar="URL", show_default=False, help="Run every query there.")
]
Injection = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|list",
        show_default=False,
        help="Put a defect of a released version back into the engine; list names the defects. The exit "
        "code is then 0 if the audit finds the defect, and 1 if it does not.",
    ),
]
KeptFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="An empty or new folder for journal, log and result. Default: a temporary folder, "
        "which is not removed.",
    ),
]
FindingId = Annotated[
    str,
    typer.Option("--finding", metavar="ID", show_default=False, help="The finding, such as tokens/negative."),
]
FindingRequest = Annotated[
    str,
    typer.Option("--request", metavar="REQUEST", show_default=False, help="The request of the finding."),
]
TestFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The test to write; - prints it.")
]
IssueFile = Annotated[
    Path | None,
    typer.Option(
        "--issue",
        metavar="FILE",
        show_default=False,
        help="Also write a bug report with the test, as Markdown.",
    ),
]
Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="The most time to spend: 90s, 5m.")]
AnyRelease = Annotated[
    bool,
    typer.Option(
        "--any-release", help="Drive the installed vLLM, although the journal is of another release."
    ),
]
Interpreter = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="INTERPRETER",
        show_default=False,
        help="The Python whose vLLM is driven. Default: the one that runs kvledger.",
    ),
]
ReproFile = Annotated[
    Path, typer.Argument(metavar="FILE", show_default=False, help="A test that kvledger repro wrote.")
]
Releases = Annotated[
    str,
    typer.Option(
        "--releases",
        metavar="FIRST..LAST",
        show_default=False,
        help="Only these, of the environments of a checkout; or names with commas between.",
    ),
]
Interpreters = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        metavar="[RELEASE=]INTERPRETER",
        show_default=False,
        help="A Python that has a vLLM, instead of the environments of a checkout. Repeatable.",
    ),
]
BisectJobs = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", metavar="N", show_default=False, help="Releases at a time. Default: one per core."
    ),
]
ConnectorName = Annotated[
    str,
    typer.Argument(metavar="CONNECTOR", show_default=False, help="The name, as in kv_connector."),
]
ConnectorModule = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", show_default=False, help="The Python file of a connector that is not vLLM's."
    ),
]
ConnectorOptions = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        show_default=False,
        help="Its kv_connector_extra_config. {folder} in it becomes an empty folder per situation.",
    ),
]
Disaggregated = Annotated[
    bool,
    typer.Option(
        "--disaggregated",
        help="The connector reads from another engine, not from a store: one prefills what it loads. "
        "Implied for NixlConnector.",
    ),
]
VerboseCard = Annotated[
    bool, typer.Option("--verbose", "-v", help="List clean situations too, and print vLLM's log.")
]
CardFormat = Annotated[str, typer.Option("--format", metavar="text|json|markdown", help="The output format.")]
Shell = Annotated[str, typer.Argument(metavar="bash|zsh|fish", show_default=False, help="Your shell.")]
Form = Annotated[
    str,
    typer.Option(
        "--form",
        metavar="provisioning|sharing",
        help="For Grafana's provisioning, or to import by hand.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder to write.")]
