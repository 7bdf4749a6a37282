"""`weald draft`: a draft replica."""

import asyncio
from typing import Annotated, Literal

import typer

from services.cli.options import (
    MEMORY,
    Advertise,
    Authority,
    Certificate,
    Device,
    Drain,
    Dtype,
    Head,
    Host,
    Key,
    LogFormatOption,
    LogLevelOption,
    MetricsPort,
    Model,
    Port,
    StoreUrl,
    TraceContent,
    TraceEndpoint,
    TraceFile,
    TraceRatio,
    memory_size,
    mutual_tls,
    placed_at,
    size,
)
from services.telemetry.logs import LogFormat, LogLevel, log_to_stderr
from services.types.configuration import DraftConfig, Tracing, TreeShape, sized
from services.types.errors import invalid

_DRAFT = DraftConfig()


def draft(
    model: Model,
    verify: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A verify replica, besides those of the store. Repeatable."),
    ] = None,
    speculative_model: Head = None,
    host: Host = "127.0.0.1",
    port: Port = 50052,
    advertise: Advertise = None,
    store: StoreUrl = MEMORY,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_cache_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of the head's keys and values, like 512MiB.")
    ] = "256MiB",
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sessions drafted at once; more are refused.")
    ] = 256,
    tree: Annotated[
        TreeShape, typer.Option(help="Trees of calls that ask for none.", metavar="SHAPE")
    ] = _DRAFT.shape,
    speculative_budget: Annotated[
        str, typer.Option(metavar="auto|N", help="Nodes of a tree, root included; auto: what pays.")
    ] = "auto",
    speculative_eagle_topk: Annotated[
        int, typer.Option(help="Nodes expanded per level at most.")
    ] = _DRAFT.beam,
    speculative_num_steps: Annotated[
        str, typer.Option(metavar="auto|N", help="Levels of a tree; auto: what pays.")
    ] = "auto",
    speculative_coupling: Annotated[
        Literal["on", "off"],
        typer.Option(help="on: rank candidates by the noise of the draws.", metavar="on|off"),
    ] = "on",
    drain: Drain = 30.0,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    log_format: LogFormatOption = LogFormat.PRETTY,
    log_level: LogLevelOption = LogLevel.WARNING,
    metrics_port: MetricsPort = None,
    trace_file: TraceFile = None,
    otlp_traces_endpoint: TraceEndpoint = None,
    trace_ratio: TraceRatio = 1.0,
    trace_content: TraceContent = False,
) -> None:
    """Serve generations: draft trees for the verify replicas, stream what they commit."""
    if not verify and store == MEMORY:
        raise invalid("name verify replicas with --verify, or the store that lists them with --store")
    place = placed_at(host, port, advertise, drain, store, metrics_port)
    levels, budget = size(speculative_num_steps), size(speculative_budget)
    config = sized(tree, levels, speculative_eagle_topk, budget, speculative_coupling == "on")
    log_to_stderr(log_format, log_level)
    tls = mutual_tls(tls_certificate, tls_key, tls_authority)
    memory = memory_size(kv_cache_memory)
    tracing = Tracing(trace_file, otlp_traces_endpoint or "", trace_ratio, trace_content)

    from services.cli.process import announce, stopped_by_signal
    from services.draft.serving import load, run
    from services.draft.tracing import Tracer
    from services.local.models import head_of, precision, quiet, usable_device
    from services.sessions.opening import opened
    from services.telemetry.export import exporting

    placed = usable_device(device)
    with exporting(tracing, "weald-draft") as sink:
        with quiet():
            service, status = load(
                model,
                head_of(model, speculative_model),
                precision(dtype, placed),
                placed,
                config,
                memory=memory,
                max_num_seqs=max_num_seqs,
                tracer=Tracer(sink, tracing, model) if sink else None,
            )

        async def serve() -> None:
            ready = announce(f"weald draft: {model} at {host}")
            async with opened(store) as sessions:
                await run(service, status, place, sessions, verify or (), tls, ready, stopped_by_signal())

        asyncio.run(serve())
