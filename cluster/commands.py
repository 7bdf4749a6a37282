"""The commands of a cluster: `weald serve`, `check`, `scale`, `status` and `demo`."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.cli.options import Authority, Certificate, Key, size
from services.types.errors import invalid
from services.types.replica import ReplicaKind

RUNNING = "auto"
DEMO_TRACES = Path("weald-demo.jsonl")
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="A Ray that runs: auto, or host:port; absent: one of its own."),
]
Running = Annotated[str, typer.Option("--address", metavar="ADDRESS", help="Of Ray; auto: the one here.")]
File = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The cluster: weald.yaml.")]


def _over(part: str, help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=f"In place of {part} in the file", **options)


def serve(
    config: File = None,
    address: Address = None,
    model: Annotated[str | None, _over("what stands", "As weald verify takes it.")] = None,
    speculative_model: Annotated[str | None, _over("what stands", "The draft head.")] = None,
    served_model_name: Annotated[str | None, _over("gateway", "What clients call the model.")] = None,
    dtype: Annotated[str | None, _over("what stands", "float32, bfloat16, float64 or auto.")] = None,
    store: Annotated[str | None, _over("what stands", "redis://…, file:///…, or embedded.")] = None,
    host: Annotated[str | None, _over("gateway", "Address to listen at.")] = None,
    port: Annotated[int | None, _over("gateway", "0 takes a free port.")] = None,
    tensor_parallel_size: Annotated[int | None, _over("verify", "Ranks that share the target.")] = None,
    max_model_len: Annotated[int | None, _over("verify", "Tokens of a session at most.")] = None,
    max_num_seqs: Annotated[int | None, _over("verify", "Sessions of a replica at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, _over("verify", "Tokens of one target step.")] = None,
    kv_cache_memory: Annotated[str | None, _over("verify", "Memory of each rank, like 60GiB.")] = None,
    verify_replicas: Annotated[int | None, _over("verify", "Verify replicas.")] = None,
    speculative_budget: Annotated[str | None, _over("draft", "Nodes of a tree, or auto.")] = None,
    speculative_eagle_topk: Annotated[int | None, _over("draft", "Nodes expanded per level.")] = None,
    speculative_num_steps: Annotated[str | None, _over("draft", "Levels of a tree, or auto.")] = None,
    draft_replicas: Annotated[int | None, _over("draft", "Draft replicas.")] = None,
) -> None:
    """Serve on Ray: draft, verify and gateway from one description; with --address it stays there.

    A second time with --address it changes what runs, replica by replica and without a failed request.
    """
    from cluster.configuration import read

    if address:
        _show_token()
    from cluster.launch import connected, deploy, local

    described = read(
        config,
        {
            "model": model,
            "speculative_model": speculative_model,
            "dtype": dtype,
            "store": store,
            "verify": {
                "tensor_parallel_size": tensor_parallel_size,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "kv_cache_memory": kv_cache_memory,
                "replicas": verify_replicas,
            },
            "draft": {
                "speculative_budget": size(speculative_budget) if speculative_budget else None,
                "speculative_eagle_topk": speculative_eagle_topk,
                "speculative_num_steps": size(speculative_num_steps) if speculative_num_steps else None,
                "replicas": draft_replicas,
            },
            "gateway": {"served_model_name": served_model_name, "host": host, "port": port},
        },
    )
    if address:
        with connected(address):
            typer.echo(_said(described.model, deploy(described)))
        return
    with local(described) as url:
        asyncio.run(_until_stopped(_said(described.model, url)))


def _said(model: str, url: str) -> str:
    import ray

    return f"weald serve: Ray at {ray.get_runtime_context().gcs_address}, {model} at {url}"


def _show_token() -> None:
    """Let Ray, once it is imported, show the token that a Ray of this user asks for, if there is one."""
    if (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


async def _until_stopped(said: str) -> None:
    from services.cli.process import stopped_by_signal

    stopping = stopped_by_signal()
    typer.echo(said)
    await stopping.wait()


def check(config: File = None, address: Address = None) -> None:
    """Tell everything that is wrong with a description, before anything starts."""
    if config is None:
        raise invalid("name the description with --config")
    if address:
        _show_token()
    from cluster.checking import problems
    from cluster.configuration import read
    from cluster.launch import LOCAL, connected, nodes

    described = read(config, {})
    with connected(address or LOCAL):
        wrong = asyncio.run(problems(described, nodes()))
    for problem in wrong:
        typer.echo(f"- {problem}")
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{config}: nothing is wrong")


def manifest(config: File = None) -> None:
    """Print what a RayService is told of a description: its field serveConfigV2."""
    if config is None:
        raise invalid("name the description with --config")
    from cluster.configuration import loaded
    from cluster.manifest import manifest as of

    typer.echo(
        f"# Written by `weald manifest --config {config.name}`: change that file, then write this one anew."
    )
    typer.echo(of(loaded(config)), nl=False)


def drain(
    within: Annotated[float, typer.Option(min=0, help="Seconds that the replicas here have for it.")] = 60.0,
    address: Running = RUNNING,
) -> None:
    """Let the replicas on this node go on elsewhere, before the node ends: the preStop hook of a pod."""
    _show_token()
    from cluster.launch import connected, here, vacate

    with connected(address):
        gone = vacate(here(), within)
    typer.echo("no replica is here" if gone else "replicas may still be here")


def scale(
    kind: Annotated[ReplicaKind, typer.Argument(help="draft or verify.")],
    replicas: Annotated[str, typer.Argument(metavar="N|MIN:MAX", help="So many, or as load asks.")],
    address: Running = RUNNING,
) -> None:
    """Change how many replicas a running application has; those that go hand over their sessions."""
    if kind is ReplicaKind.GATEWAY:
        raise invalid(
            "gateways do not scale by load; write gateway.replicas in weald.yaml, then `weald serve`"
        )
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", replicas)
    if not match:
        raise invalid(f"{replicas!r} is no number of replicas; write 2, or 1:4 for as many as load asks for")
    from cluster.configuration import parse

    _show_token()
    from cluster.launch import connected, deploy, described

    bounds = {"min": int(match[1]), "max": int(match[2] or match[1])}
    with connected(address):
        values = described().model_dump(mode="json")
        values[kind]["replicas"] |= bounds
        deploy(parse(values))
    typer.echo(f"{kind}: {replicas}")


def status(
    endpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT|URL]",
            help="A replica, or a store like redis://…; absent: the application that runs on Ray.",
        ),
    ] = None,
    address: Running = RUNNING,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
) -> None:
    """Show the replicas of the application that runs on Ray; or one replica; or all that a store lists."""
    if endpoint:
        from services.cli.status import status as of_endpoint

        of_endpoint(endpoint, as_json, tls_certificate, tls_key, tls_authority)
        return
    _show_token()
    from cluster.launch import connected
    from cluster.overview import overview, table

    with connected(address):
        rows = overview()
    if as_json:
        typer.echo(json.dumps({"replicas": rows}))
    else:
        Console().print(table(rows))


def demo() -> None:
    """Answer a chat prompt over HTTP, with draft trees and without, and compare; on a Ray of its own."""
    from cluster.configuration import parse
    from cluster.launch import local
    from services.cli.demo import MODEL, compare, traced

    # Trees are to be seen in every round, whether or not they pay on this machine.
    whole = {"speculative_budget": 60, "speculative_num_steps": 6}
    console, traces = Console(highlight=False), DEMO_TRACES.absolute()
    traces.unlink(missing_ok=True)
    telemetry = {"trace_file": traces, "trace_content": True}
    service = local(parse({"model": MODEL, "draft": whole, "gateway": {"port": 0}, "telemetry": telemetry}))
    traced(compare(service, MODEL, console), traces, console)
