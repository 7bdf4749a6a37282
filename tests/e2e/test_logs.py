"""Logs of real processes: each call with its session and trace, and no text of it."""

import json
from typing import Any

import httpx
import pytest

from services.bench.replicas import replica

pytestmark = pytest.mark.slow
TRACE = "0af7651916cd43dd8448eb211c80319c"
PROMPT = "abcdabcd"


def test_every_call_is_told_with_its_session_and_trace_but_without_its_text(
    tiny: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    logged = "--log-format", "json", "--log-level", "info"
    with (
        replica(*tiny.verify, *logged) as verifier,
        replica(*tiny.draft(verifier.address), *logged) as drafter,
        replica(*tiny.gateway(drafter.address), *logged) as gateway,
    ):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 1}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
        url = f"http://{gateway.address}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
    said = capfd.readouterr().err
    lines = [json.loads(line) for line in said.splitlines()]
    (call,) = (line for line in lines if line["message"].startswith("a call is over"))
    assert call["message"] == "a call is over: length, 20 tokens"
    assert call["session"].startswith(answer["id"])
    assert call["trace"] == TRACE
    (request,) = (line for line in lines if line.get("request") == "mine")
    assert "POST /v1/completions: 200" in request["message"]
    assert PROMPT not in said
    assert answer["choices"][0]["text"] not in said
