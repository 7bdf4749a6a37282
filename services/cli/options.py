"""Options that several commands share, and how their values are read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from services.telemetry.logs import LogFormat, LogLevel
from services.types.configuration import Place
from services.types.errors import invalid

if TYPE_CHECKING:
    # gRPC is for those who serve or call a service.
    from services.wire.transport import Tls

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, and so on.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32", "float64"],
    typer.Option(metavar="TYPE", help="float32, bfloat16 or float64; auto: bfloat16 on cuda, else float32."),
]
Model = Annotated[str, typer.Option(help="smollm2-135m, a directory, a .gguf file, or a hub name.")]
Head = Annotated[
    str | None, typer.Option(help="The draft head, a directory or hub name; smollm2-135m brings its own.")
]
Host = Annotated[str, typer.Option(help="Address to listen at.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")]
Drain = Annotated[float, typer.Option(metavar="SECONDS", help="How long sessions may go on at shutdown.")]
MEMORY = "memory://"
StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="Journal and registry: redis://…, rediss://…, what weald store tells, or memory: one process.",
    ),
]
Advertise = Annotated[
    str | None, typer.Option(metavar="HOST[:PORT]", help="Where others reach this replica; absent: --host.")
]
Certificate = Annotated[
    Path | None,
    typer.Option(help="Own certificate, PEM; the three together: mutual TLS.", rich_help_panel="TLS"),
]
Key = Annotated[Path | None, typer.Option(help="Its key, PEM.", rich_help_panel="TLS")]
Authority = Annotated[
    Path | None, typer.Option(help="Authority of both sides' certificates, PEM.", rich_help_panel="TLS")
]

Value = TypeVar("Value")


MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=0, max=65535, help="Where Prometheus can ask; absent: nowhere."),
]


LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", metavar="pretty|json", help="Of lines on standard error.")
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option("--log-level", metavar="LEVEL", help="The least that is told: debug, info, warning, error."),
]


def _traces(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Traces", **options)


TraceFile = Annotated[
    Path | None, _traces("Append spans to this file, as lines of OTLP in JSON.", metavar="FILE")
]
TraceEndpoint = Annotated[
    str | None,
    _traces(
        "Send spans to an OpenTelemetry collector, by gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says "
        "http/protobuf.",
        metavar="URL",
        envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    ),
]
TraceRatio = Annotated[float, _traces("Share of the requests without a trace that get one.", min=0, max=1)]
TraceContent = Annotated[bool, _traces("Token ids, of which the text can be read, are told too.")]

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def memory_size(text: str) -> int:
    """Bytes of a size like 512MiB, 20GiB or 4e9.

    Raises:
        WealdError: `INVALID_ARGUMENT` when it is none.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS:
        raise invalid(f"{text!r} is no size of memory; write a number and a unit, like 512MiB or 20GiB")
    try:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except ValueError as error:
        raise invalid(f"{text!r} is no size of memory; write one like 512MiB or 20GiB") from error


def switch(text: str) -> bool:
    """`on` or `off`.

    Raises:
        ValueError: it is neither.
    """
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


def listed(text: str, read: Callable[[str], Value], example: str) -> list[Value]:
    """Values with commas between, each read from its word.

    Raises:
        typer.BadParameter: `read` raised `ValueError`; the message shows the example.
    """
    try:
        return [read(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} cannot be read; write it like {example}") from error


def size(text: str) -> int | Literal["auto"]:
    """A number of nodes or levels, or `auto`.

    Raises:
        WealdError: `INVALID_ARGUMENT` when it is neither.
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError as error:
        raise invalid(f"{text!r} is no size of a tree; write auto or a number") from error


def mutual_tls(certificate: Path | None, key: Path | None, authority: Path | None) -> "Tls | None":
    """The files of mutual TLS, or None when none is named.

    Raises:
        WealdError: `INVALID_ARGUMENT` when only some are.
    """
    if certificate and key and authority:
        from services.wire.transport import Tls

        return Tls(certificate, key, authority)
    if certificate or key or authority:
        raise invalid("mutual TLS needs all of --tls-certificate, --tls-key and --tls-authority")
    return None


def shared(store: str) -> str:
    """The URL of a store that others register with.

    Raises:
        WealdError: `INVALID_ARGUMENT` when it is one process's own.
    """
    if store == MEMORY:
        raise invalid(f"{MEMORY} is known to one process alone; name the --store of the replicas")
    return store


def placed_at(
    host: str, port: int, advertise: str | None, drain_s: float, store: str, metrics_port: int | None
) -> Place:
    """Where a replica serves.

    Raises:
        WealdError: `INVALID_ARGUMENT` when a registry would list an address that nobody can call.
    """
    if store != MEMORY and advertise is None and host in {"0.0.0.0", "::", "[::]", ""}:
        raise invalid(f"--host {host or '(empty)'} is no address others can call; give one with --advertise")
    return Place(host, port, advertise, drain_s, metrics_port=metrics_port)
