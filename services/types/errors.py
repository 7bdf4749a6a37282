"""The one catalogue of errors: every error a caller can see carries a code from here."""

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """What went wrong, independent of the transport that carries it."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request can never succeed as it stands: a parameter, a token or a tree is malformed."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """The prompt leaves no room below the target's context length."""
    UNKNOWN_SESSION = "unknown_session"
    """No session of that id is open here."""
    ALREADY_EXISTS = "already_exists"
    """A session of that id is already open here."""
    STALE_EPOCH = "stale_epoch"
    """The session was taken over with a higher epoch."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """Pages or places are used up; the same request can succeed later."""
    INCOMPATIBLE_CHECKPOINT = "incompatible_checkpoint"
    """A checkpoint is missing, malformed, or does not fit the other model."""
    UNSUPPORTED_MODEL = "unsupported_model"
    """The model's architecture cannot run on paged tree attention."""
    UNAVAILABLE = "unavailable"
    """The service cannot be reached or is going away; another replica can serve the request."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The answer did not come in time."""
    CANCELLED = "cancelled"
    """The caller gave up."""
    DIVERGED = "diverged"
    """The text delivered and the one that would go on are two, as after a near-tie that rounded otherwise."""
    INTERNAL = "internal"
    """An invariant broke; the fault is ours."""


class WealdError(Exception):
    """An error with a code from the catalogue and a sentence that tells the user what to do.

    `retry_after_s`: seconds after which the same request may succeed; None when that is not known, or never.
    """

    def __init__(self, code: ErrorCode, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.code, self.message, self.retry_after_s)


def _made(code: ErrorCode, message: str, retry_after_s: float | None) -> WealdError:
    return WealdError(code, message, retry_after_s=retry_after_s)


def invalid(message: str) -> WealdError:
    """An `INVALID_ARGUMENT` error, the commonest one."""
    return WealdError(ErrorCode.INVALID_ARGUMENT, message)


def incompatible(message: str) -> WealdError:
    """An `INCOMPATIBLE_CHECKPOINT` error."""
    return WealdError(ErrorCode.INCOMPATIBLE_CHECKPOINT, message)
