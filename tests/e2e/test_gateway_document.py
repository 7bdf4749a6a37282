"""Requests that schemathesis makes from the OpenAPI document, right and wrong ones: none fails or hangs."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

WITHIN_S = 60.0
"""For an answer that takes a second on an idle machine."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
PATHS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/v1/models/{model}": "GET",
    "/health": "GET",
    "/ready": "GET",
    "/version": "GET",
    "/metrics": "GET",
    "/metrics/targets": "GET",
    "/replicas": "GET",
    "/ui": "GET",
}


@pytest.fixture(scope="module")
def document(served: Any) -> Any:
    """The document as schemathesis reads it."""
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Connections that are used again."""
    with requests.Session() as one:
        yield one


def modest(body: Any) -> Any:
    """The same request, of the model that is there, and with little to generate."""
    if isinstance(body, dict) and {"prompt", "messages"} & body.keys():
        body = body | {"model": "tiny"}
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 3)
        if isinstance(body.get("prompt"), list):
            body["prompt"] = body["prompt"][:3]
    return body


def test_the_document_has_all_paths(document: Any) -> None:
    found = {op.ok().path: op.ok().method.upper() for op in document.get_all_operations()}
    assert found == PATHS


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, GenerationMode.POSITIVE) for path in PATHS]
    # Of a path that takes nothing there is no wrong request.
    + [(path, GenerationMode.NEGATIVE) for path, method in PATHS.items() if method == "POST"],
)
def test_no_request_fails_or_hangs(
    path: str, mode: GenerationMode, document: Any, session: requests.Session, served: Any
) -> None:
    operation = document[path][PATHS[path]]
    statuses: set[int] = set()

    @settings(
        max_examples=100 if PATHS[path] == "POST" else 15,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = modest(case.body)
            case.headers.pop("last-event-id", None)
        response = case.call(session=session, timeout=WITHIN_S)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    send()
    if mode is GenerationMode.POSITIVE and path != "/v1/models/{model}":
        assert 200 in statuses
    assert httpx.get(f"{served.url}/health").status_code == 200
