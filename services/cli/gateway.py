"""`weald gateway`: the OpenAI-compatible API in front of draft replicas."""

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.options import (
    Authority,
    Certificate,
    Drain,
    Host,
    Key,
    LogFormatOption,
    LogLevelOption,
    Model,
    Port,
    TraceEndpoint,
    TraceFile,
    TraceRatio,
    memory_size,
    mutual_tls,
    shared,
)
from services.telemetry.logs import LogFormat, LogLevel, log_to_stderr
from services.types.configuration import Tracing
from services.types.errors import invalid


def _access(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Access", **options)


def _limit(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Limits of each worker", **options)


def gateway(
    model: Model,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A draft replica, besides those of the store. Repeatable."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where draft replicas register: redis://…, or what weald store tells."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model; absent: as --model.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the port.")] = 1,
    drain: Drain = 30.0,
    api_key: Annotated[
        list[str] | None,
        _access("A key that lets in; repeatable. Without any, all are let in.", envvar="WEALD_API_KEY"),
    ] = None,
    api_key_file: Annotated[Path | None, _access("A file of such keys, one per line.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        _access("Web pages of this origin may call; * for all. Repeatable.", metavar="ORIGIN"),
    ] = None,
    max_concurrent_requests: Annotated[int, _limit("Requests served at once.", min=1)] = 256,
    max_queued_requests: Annotated[int, _limit("Requests that wait; more are refused.", min=0)] = 256,
    max_request_size: Annotated[str, _limit("Of a request's body.", metavar="SIZE")] = "4MiB",
    request_timeout: Annotated[float, _limit("For a whole answer.", metavar="SECONDS")] = 600.0,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    log_format: LogFormatOption = LogFormat.PRETTY,
    log_level: LogLevelOption = LogLevel.WARNING,
    trace_file: TraceFile = None,
    otlp_traces_endpoint: TraceEndpoint = None,
    trace_ratio: TraceRatio = 1.0,
) -> None:
    """Serve OpenAI's API over HTTP; TLS is for the connections to draft replicas."""
    if not endpoint and not store:
        raise invalid("name draft replicas with --endpoint, or the store that lists them with --store")
    log_to_stderr(log_format, log_level)
    tls = mutual_tls(tls_certificate, tls_key, tls_authority)
    size = memory_size(max_request_size)
    keys = (*(api_key or ()), *keys_of(api_key_file))

    from services.cli.process import announce
    from services.cli.workers import serve
    from services.engine.names import find_text
    from services.gateway.app import Settings
    from services.gateway.limits import Limits
    from services.gateway.serving import listen

    name = served_model_name or model
    settings = Settings(
        model=name,
        target=model,
        directory=find_text(model),
        endpoints=tuple(endpoint or ()),
        store=shared(store) if store else None,
        tls=tls,
        api_keys=keys,
        origins=tuple(allow_origin or ()),
        tracing=Tracing(trace_file, otlp_traces_endpoint or "", trace_ratio),
        limits=Limits(max_concurrent_requests, max_queued_requests, size, request_timeout),
    )
    with listen(host, port) as listener:
        serve(settings, listener, workers, drain, announce(f"weald gateway: {name} at {host}"))


def keys_of(file: Path | None) -> list[str]:
    """The API keys in a file, none without one. Raises `WealdError(INVALID_ARGUMENT)` when it holds none."""
    if file is None:
        return []
    try:
        keys = file.read_text().split()
    except (OSError, ValueError) as error:
        raise invalid(f"the keys in {file} cannot be read: {error}") from error
    if not keys:
        raise invalid(f"{file} has no key; write one per line, or leave --api-key-file out")
    return keys
