"""Whatever goes wrong, the answer has OpenAI's shape, the right status, and a sentence that helps."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.middleware import Middleware
from starlette.responses import StreamingResponse

from services.gateway.errors import MAX_CHARACTERS, HttpError, answered, install, problem_of
from services.types.errors import ErrorCode, WealdError
from services.wire.errors import SHAPES


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    depth: int = 0


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    count: int = 0
    inner: list[Inner] = []


def app_that_raises(error: Exception | None) -> FastAPI:
    """Its route takes a `Body`, and raises the error."""
    app = FastAPI(middleware=[Middleware(answered)])
    install(app)

    @app.post("/")
    async def route(body: Body) -> None:
        if error:
            raise error

    @app.get("/begun")
    async def begun() -> StreamingResponse:
        async def content() -> Any:
            yield b"some"
            raise WealdError(ErrorCode.UNAVAILABLE, "lost")

        return StreamingResponse(content())

    return app


def answer_to(error: Exception | None = None, method: str = "POST", path: str = "/", **sent: Any) -> Any:
    """The response, checked for its shape unless it is fine."""

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app_that_raises(error))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **(sent or {"json": {"model": "m"}}))

    response = asyncio.run(scenario())
    if response.status_code != 200:
        assert response.headers["content-type"] == "application/json"
        assert response.json().keys() == {"error"}
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    return response


def told(**sent: Any) -> dict[str, Any]:
    """The error object of a request that is refused."""
    response = answer_to(**sent)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_of_the_catalogue_has_the_status_and_type_of_the_table(
    code: ErrorCode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        response = answer_to(WealdError(code, "do something else"))
    assert response.status_code == SHAPES[code].http
    error = {"message": "do something else", "type": SHAPES[code].type, "param": None, "code": code.value}
    assert response.json() == {"error": error}


@pytest.mark.parametrize(("wait_s", "header"), [(None, None), (0.2, "1"), (3.0, "3"), (3.1, "4")])
def test_who_may_try_again_later_is_told_when(wait_s: float | None, header: str | None) -> None:
    unavailable = answer_to(WealdError(ErrorCode.UNAVAILABLE, "gone", retry_after_s=wait_s))
    assert unavailable.headers.get("retry-after") == header
    full = answer_to(WealdError(ErrorCode.RESOURCE_EXHAUSTED, "full", retry_after_s=wait_s))
    assert full.status_code == 429
    assert full.headers["retry-after"] == (header or "1")


def test_what_nobody_expected_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    response = answer_to(ZeroDivisionError("secret"))
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal"
    assert "secret" in caplog.text
    assert "Traceback" in caplog.text


def test_what_http_alone_knows_of_comes_as_it_is() -> None:
    error = HttpError(404, "no such model", param="model", code="model_not_found", headers={"x-a": "b"})
    response = answer_to(error)
    assert (response.status_code, response.headers["x-a"]) == (404, "b")
    assert response.json()["error"] == {
        "message": "no such model",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "model", "missing_required_parameter"),
        ({"model": "m", "temprature": 1}, "temprature", "unknown_parameter"),
        ({"model": "m", "count": "5"}, "count", "invalid_value"),
        ({"model": "m", "inner": [{}, {"depth": 1.5}]}, "inner[1].depth", "invalid_value"),
        ({"model": "m", "inner": [{"deep": 1}]}, "inner[0].deep", "unknown_parameter"),
    ],
)
def test_a_field_that_is_wrong_is_named(body: dict[str, Any], param: str, code: str) -> None:
    error = told(json=body)
    assert (error["param"], error["code"]) == (param, code)
    assert f"`{param}`" in error["message"]


@pytest.mark.parametrize("body", ["[1]", "3", "null", "", '"text"'])
def test_a_body_that_is_no_object_is_told_what_to_send(body: str) -> None:
    error = told(content=body, headers={"content-type": "application/json"})
    assert error["message"].startswith("the body is no JSON object; send one")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model":', "the body is not JSON: Expecting value at character 9"),
        (b'{"model": "\xff"}', "the body is not UTF-8: invalid start byte at byte 11"),
        (b'{"model": "\xe6\x97', "the body is not UTF-8: unexpected end of data at byte 11"),
        (b"[" * 100_000 + b"]" * 100_000, "the JSON is nested too deeply"),
        (b'{"model": ' * 50_000, "the JSON is nested too deeply"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(body: bytes, says: str) -> None:
    assert told(content=body, headers={"content-type": "application/json"})["message"].startswith(says)


def test_half_a_character_that_a_client_sends_can_come_back_in_the_sentence() -> None:
    for body in (r'{"model": "m", "\ud800": 1}', r'{"model": "m", "caf\u00e9": 1}'):
        told(content=body, headers={"content-type": "application/json"})
    problem = problem_of(HttpError(404, "no `\ud800` here", param="\ud800"))
    assert json.loads(problem.body)["error"]["message"] == "no `\ud800` here"
    problem.response.render(problem.body)


def test_a_sentence_that_a_client_makes_long_is_shortened() -> None:
    error = told(json={"model": "m", "x" * 100_000: 1})
    assert len(error["message"]) == len(error["param"]) == MAX_CHARACTERS
    assert error["message"].endswith("…")


def test_paths_and_methods_that_are_not_there_are_errors_of_the_same_shape() -> None:
    missing = answer_to(path="/nothing")
    assert missing.status_code == 404
    assert "/openapi.json" in missing.json()["error"]["message"]
    other = answer_to(method="DELETE")
    assert (other.status_code, other.headers["allow"]) == (405, "POST")
    assert "POST" in other.json()["error"]["message"]


def test_an_error_in_the_middle_of_an_answer_breaks_it_off() -> None:
    with pytest.raises(WealdError, match="lost"):
        answer_to(method="GET", path="/begun")
