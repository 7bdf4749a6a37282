"""Errors as HTTP answers, in the shape of OpenAI's API."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.schemas import complaint
from services.types.errors import ErrorCode
from services.wire.errors import SHAPES, told

BAD_REQUEST = "invalid_request_error"
MAX_CHARACTERS = 1000
"""Of a sentence: what a client sends can come back in it."""
_NESTED = "the JSON is nested too deeply; send a flatter one"
_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
"""OpenAI's code for what pydantic calls so."""
_NO_OBJECT = frozenset({"dict_type", "missing", "model_attributes_type", "model_type"})


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client is told of it."""

    status: int
    message: str
    type: str = BAD_REQUEST
    param: str | None = None
    """The field of the request that is at fault."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> str:
        """The JSON object that OpenAI's clients look for, in ASCII."""
        # What came as JSON can be half a surrogate pair, which UTF-8 has no bytes for: it stays escaped.
        told = {
            "message": _shortened(self.message),
            "type": self.type,
            "param": self.param and _shortened(self.param),
            "code": self.code,
        }
        return json.dumps({"error": told})

    @property
    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, self.status, self.headers, "application/json")


class HttpError(Exception):
    """What HTTP alone knows of: no key, no such model, a body that is too large, and so on."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        """The error with this status; `more` as for `Problem`."""
        super().__init__(message)
        self.problem = Problem(status, message, **more)


def problem_of(error: Exception) -> Problem:
    """How a client is told of an error; what is the fault of ours is logged with its detail."""
    match error:
        case HttpError():
            return error.problem
        case RequestValidationError():
            return _of_body(error.errors())
        case HTTPException():
            return _of_http(error)
        case RecursionError():
            return Problem(HTTPStatus.BAD_REQUEST, _NESTED)
    known = told(error)
    shape = SHAPES[known.code]
    headers = {}
    if known.retry_after_s is not None or known.code is ErrorCode.RESOURCE_EXHAUSTED:
        headers["Retry-After"] = str(max(1, math.ceil(known.retry_after_s or 0)))
    return Problem(shape.http, known.message, shape.type, code=known.code.value, headers=headers)


def answered(app: ASGIApp) -> ASGIApp:
    """Every error is an answer, unless the answer has begun."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await problem_of(error).response(scope, receive, send)

    return answer


def install(app: FastAPI) -> None:
    """Leave no error to the framework, which has other shapes for them; `answered` answers."""

    async def again(request: Request, error: Exception) -> Response:
        raise error

    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, again)


def _of_http(error: HTTPException) -> Problem:
    status, headers = HTTPStatus(error.status_code), error.headers or {}
    match error.__cause__:
        case UnicodeDecodeError(reason=reason, start=start):
            return Problem(status, f"the body is not UTF-8: {reason} at byte {start}")
        case RecursionError():
            return Problem(status, _NESTED)
    match status:
        case HTTPStatus.NOT_FOUND:
            return Problem(status, "there is nothing at this path; /openapi.json lists what there is")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            methods = headers.get("Allow", "another method")
            return Problem(status, f"this path takes {methods} alone", headers=headers)
    return Problem(status, str(error.detail), headers=headers)


def _of_body(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """What pydantic found first."""
    first = errors[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']} at character {place[0]}"
        return Problem(HTTPStatus.BAD_REQUEST, message)
    if not place and kind in _NO_OBJECT:
        message = "the body is no JSON object; send one, with `Content-Type: application/json`"
        return Problem(HTTPStatus.BAD_REQUEST, message)
    param, message = complaint(errors)
    return Problem(HTTPStatus.BAD_REQUEST, message, param=param, code=_CODES.get(kind, "invalid_value"))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
