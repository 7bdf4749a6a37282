"""How an error of the catalogue looks on every transport, and the way back.

A call that fails ends with a gRPC status; the code of the catalogue and the time to wait travel beside it in
the trailing metadata, since several codes share a status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Never

import grpc
from grpc import StatusCode

from services.types.errors import ErrorCode, WealdError, invalid

CODE_KEY = "weald-error-code"
RETRY_KEY = "weald-retry-after-s"
MAX_CHARACTERS = 500
"""Of a sentence in a status: gRPC escapes each into up to 12 bytes, and drops headers beyond 8 KiB."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """One code on the transports."""

    status: StatusCode
    """Of a gRPC call."""
    http: int
    type: str
    """Of the error object of the OpenAI API."""


SHAPES: dict[ErrorCode, Shape] = {
    ErrorCode.INVALID_ARGUMENT: Shape(StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Shape(StatusCode.OUT_OF_RANGE, 400, "invalid_request_error"),
    # An HTTP client names no session: these three are accidents of ours, and a new attempt can succeed.
    ErrorCode.UNKNOWN_SESSION: Shape(StatusCode.NOT_FOUND, 503, "server_error"),
    ErrorCode.ALREADY_EXISTS: Shape(StatusCode.ALREADY_EXISTS, 503, "server_error"),
    ErrorCode.STALE_EPOCH: Shape(StatusCode.ABORTED, 503, "server_error"),
    ErrorCode.RESOURCE_EXHAUSTED: Shape(StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_exceeded"),
    ErrorCode.INCOMPATIBLE_CHECKPOINT: Shape(StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorCode.UNSUPPORTED_MODEL: Shape(StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    ErrorCode.UNAVAILABLE: Shape(StatusCode.UNAVAILABLE, 503, "server_error"),
    ErrorCode.DEADLINE_EXCEEDED: Shape(StatusCode.DEADLINE_EXCEEDED, 504, "server_error"),
    ErrorCode.CANCELLED: Shape(StatusCode.CANCELLED, 499, "invalid_request_error"),
    ErrorCode.DIVERGED: Shape(StatusCode.DATA_LOSS, 500, "server_error"),
    ErrorCode.INTERNAL: Shape(StatusCode.INTERNAL, 500, "server_error"),
}
"""The one table: every code of the catalogue."""

_SAID_BY_GRPC = {
    StatusCode.UNAVAILABLE: (
        ErrorCode.UNAVAILABLE,
        "the service cannot be reached; see that it runs, and that address and certificates are right",
    ),
    StatusCode.DEADLINE_EXCEEDED: (
        ErrorCode.DEADLINE_EXCEEDED,
        "the service did not answer in time; try again, or allow more time",
    ),
    StatusCode.CANCELLED: (
        ErrorCode.CANCELLED,
        "the call was cancelled; start it again if it is still wanted",
    ),
    StatusCode.RESOURCE_EXHAUSTED: (
        ErrorCode.RESOURCE_EXHAUSTED,
        "the service is at its limits; try again later",
    ),
    StatusCode.UNIMPLEMENTED: (
        ErrorCode.UNAVAILABLE,
        "the service at this address does not know the call; see that it is a Weald service of this version",
    ),
}
"""Statuses that gRPC itself gives to calls that no servicer answered."""


def told(error: Exception) -> WealdError:
    """What a caller may know of an error: one of the catalogue as it is, of others only that they happened.

    Those others, and broken invariants, are logged with all their detail.
    """
    if isinstance(error, WealdError) and error.code is not ErrorCode.INTERNAL:
        return error
    log.error("%s", error, exc_info=error)
    if isinstance(error, WealdError):
        return error
    return WealdError(ErrorCode.INTERNAL, "the service failed; its log has the reason")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> Never:
    """End a call with an error, as `told`."""
    error = told(error)
    metadata = [(CODE_KEY, error.code.value)]
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, repr(error.retry_after_s)))
    sentence = error.message
    if len(sentence) > MAX_CHARACTERS:
        sentence = sentence[: MAX_CHARACTERS - 1] + "…"
    await context.abort(SHAPES[error.code].status, sentence, tuple(metadata))


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Around the body of a servicer's method: what it raises ends the call with its error."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await abort(context, error)


@contextmanager
def calling() -> Iterator[None]:
    """Around a call to a service: a gRPC error is raised as the `WealdError` it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        # A call that is cancelled, as by the closing of its channel, must not pass for a task that is.
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise WealdError(*_SAID_BY_GRPC[StatusCode.CANCELLED]) from None


def from_rpc_error(error: grpc.aio.AioRpcError) -> WealdError:
    """The error that the other side aborted with, or what gRPC itself has to say, in our words."""
    details = error.details() or ""
    metadata = dict(error.trailing_metadata() or ())
    try:
        code = ErrorCode(str(metadata[CODE_KEY]))
        wait = metadata.get(RETRY_KEY)
        return WealdError(code, details, retry_after_s=None if wait is None else float(wait))
    except (KeyError, ValueError):
        return _from_status(error.code(), details)


def _from_status(status: StatusCode, details: str) -> WealdError:
    """An error without a code of ours: no servicer raised it, or one of a version with more codes."""
    if status is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return invalid(f"a message is larger than the wire carries; send less at once ({details})")
    code, sentence = _SAID_BY_GRPC.get(
        status, (ErrorCode.INTERNAL, f"the service failed with the gRPC status {status.name}; see its log")
    )
    return WealdError(code, f"{sentence} ({details})" if details else sentence)
