"""`weald verify`: a verify replica, or one of its tensor-parallel ranks."""

import asyncio
from typing import Annotated, Any

import typer

from services.cli.options import (
    MEMORY,
    Advertise,
    Authority,
    Certificate,
    Device,
    Drain,
    Dtype,
    Host,
    Key,
    LogFormatOption,
    LogLevelOption,
    MetricsPort,
    Model,
    Port,
    StoreUrl,
    TraceEndpoint,
    TraceFile,
    memory_size,
    mutual_tls,
    placed_at,
)
from services.telemetry.logs import LogFormat, LogLevel, log_to_stderr
from services.types.configuration import Tracing, VerifyLimits
from services.types.errors import invalid

_LIMITS = VerifyLimits()


def _batching(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Batching", **options)


def _ranks(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Tensor parallel", **options)


def verify(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 50051,
    advertise: Advertise = None,
    store: StoreUrl = MEMORY,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_cache_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of keys, values and features, like 512MiB or 60GiB.")
    ] = "1GiB",
    max_model_len: Annotated[
        int | None, _batching("Tokens of a session at most; absent: the target's context.", min=2)
    ] = None,
    max_num_seqs: Annotated[int, _batching("Sessions that run at once.")] = _LIMITS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _batching("Tokens of one target step.")
    ] = _LIMITS.max_num_batched_tokens,
    max_waiting: Annotated[int, _batching("Sessions that may wait; more are refused.")] = _LIMITS.max_waiting,
    expiry: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long sessions outlive a vanished drafter.")
    ] = _LIMITS.expiry_s,
    drain: Drain = 30.0,
    tensor_parallel_size: Annotated[int, _ranks("Ranks that share the target.", min=1)] = 1,
    rank: Annotated[int | None, _ranks("This process' rank; absent: all ranks start here.", min=0)] = None,
    master_addr: Annotated[str, _ranks("Host of rank 0.")] = "127.0.0.1",
    master_port: Annotated[int | None, _ranks("Port where ranks meet; needed with --rank.", min=1)] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    log_format: LogFormatOption = LogFormat.PRETTY,
    log_level: LogLevelOption = LogLevel.WARNING,
    metrics_port: MetricsPort = None,
    trace_file: TraceFile = None,
    otlp_traces_endpoint: TraceEndpoint = None,
) -> None:
    """Serve the target: verify draft trees of many sessions at once."""
    limits = VerifyLimits(max_num_batched_tokens, max_num_seqs, max_waiting, expiry)
    place = placed_at(host, port, advertise, drain, store, metrics_port)
    log_to_stderr(log_format, log_level)
    tls = mutual_tls(tls_certificate, tls_key, tls_authority)
    memory = memory_size(kv_cache_memory)
    if rank is not None and (rank >= tensor_parallel_size or master_port is None):
        raise invalid(f"--rank is one of 0 to {tensor_parallel_size - 1}, and needs --master-port")

    from services.cli.process import announce, stopped_by_signal
    from services.cli.ranks import joined
    from services.engine.checkpoints import resolve
    from services.engine.ranks import follow
    from services.engine.target import Target
    from services.local.models import precision, quiet, usable_device
    from services.sessions.opening import opened
    from services.telemetry.export import exporting
    from services.verify.serving import load, run

    placed = usable_device(device)
    exact = precision(dtype, placed)
    tracing = Tracing(trace_file, otlp_traces_endpoint or "")
    with (
        joined(tensor_parallel_size, rank, master_addr, master_port, placed) as ranks,
        exporting(tracing, "weald-verify") as sink,
    ):
        if ranks and ranks.rank:
            with quiet():
                target = Target.load(resolve(model), exact, ranks.device, ranks)
            follow(target)
            return
        with quiet():
            service, status = load(
                model,
                exact,
                ranks.device if ranks else placed,
                memory=memory,
                max_model_len=max_model_len,
                limits=limits,
                ranks=ranks,
                sink=sink,
            )

        async def serve() -> None:
            ready = announce(f"weald verify: {model} at {host}")
            async with opened(store) as sessions:
                await run(service, status, place, sessions, tls, ready, stopped_by_signal())

        asyncio.run(serve())
