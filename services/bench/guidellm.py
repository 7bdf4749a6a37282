"""`weald bench guidellm`: what a load generator that is not ours measures through the gateway."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from services.bench.replicas import WHOLE_TREES, replica
from services.bench.report import figures_table, write_json
from services.engine.names import find_text
from services.types.errors import ErrorCode, WealdError, invalid

STREAMS = (1, 4)
"""Requests at once."""
TOKENS = 64
"""Of every prompt, the chat template not counted, and of every answer."""
MODES = {"plain": {"speculative": False}, "trees": {}}


def bench_guidellm(model: str, requests: int, guidellm: str, json_file: Path | None) -> None:
    """Start verify, draft and gateway, and let GuideLLM load them.

    Args:
        model: that is served.
        requests: of each stream.
        guidellm: its command; it lives in an environment of its own.
        json_file: where the figures go.

    Raises:
        WealdError: `INVALID_ARGUMENT` when there is no such command; `UNAVAILABLE` when it fails.
    """
    command = shutil.which(guidellm)
    if command is None:
        raise invalid(
            f"there is no command {guidellm}; install GuideLLM (`python -m venv .guidellm && "
            ".guidellm/bin/pip install guidellm`) and name it with --guidellm .guidellm/bin/guidellm"
        )
    rows = []
    with (
        replica("verify", "--model", model, "--port", 0) as verifier,
        replica(
            "draft", "--model", model, *WHOLE_TREES, "--port", 0, "--verify", verifier.address
        ) as drafter,
        replica("gateway", "--model", model, "--port", 0, "--endpoint", drafter.address) as gateway,
        tqdm(total=len(STREAMS) * len(MODES), desc="bench guidellm", unit="run") as bar,
    ):
        for streams in STREAMS:
            for mode, body in MODES.items():
                found = _run(command, model, gateway.address, streams, requests * streams, body)
                rows.append({"at_once": streams, "mode": mode} | found)
                bar.update()
    if json_file:
        settings = {"model": model, "requests": requests, "prompt_tokens": TOKENS, "output_tokens": TOKENS}
        write_json(json_file, "guidellm", settings | {"version": _version(command)}, {"rows": rows})
    Console().print(figures_table("GuideLLM, chat completions, streamed, temperature 1, ms", rows))


def _run(
    command: str, model: str, address: str, streams: int, count: int, body: dict[str, Any]
) -> dict[str, Any]:
    backend = {"kind": "openai_http", "target": f"http://{address}", "model": model, "extras": {"body": body}}
    with tempfile.TemporaryDirectory(prefix="weald-guidellm-") as directory:
        file = Path(directory) / "report.json"
        options = {
            "--backend": json.dumps(backend),
            "--tokenizer": f"kind=hf_auto,model={find_text(model)}",
            "--data": f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens={TOKENS}",
            "--profile": f"kind=concurrent,streams={streams}",
            "--constraint": f"kind=max_requests,count={count}",
            "--output": f"kind=json,path={file}",
        }
        words = [word for pair in options.items() for word in pair]
        done = subprocess.run(
            [command, "run", *words, "--disable-progress"],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise WealdError(ErrorCode.UNAVAILABLE, f"{command} failed: {done.stderr[-2000:]}")
        metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    first, between = metrics["time_to_first_token_ms"], metrics["inter_token_latency_ms"]
    return {
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
        "first_token_p50": first["successful"]["median"],
        "first_token_p95": first["successful"]["percentiles"]["p95"],
        "inter_token_p50": between["successful"]["median"],
        "inter_token_p95": between["successful"]["percentiles"]["p95"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["total"]["mean"],
    }


def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True).stdout.strip()
