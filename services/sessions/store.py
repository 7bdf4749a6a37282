"""The contract of the store: the journal of sessions and the registry of replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.types.errors import ErrorCode, WealdError
from services.types.replica import Replica, ReplicaKind
from services.types.session import FinishReason, Record

UNFINISHED_S = 3600.0
"""A session that nobody finishes is forgotten so many seconds after its last write."""
FINISHED_S = 600.0
"""A finished one, so many seconds after its end."""


@dataclass(frozen=True, slots=True)
class Append:
    """Committed tokens of one session, for the journal."""

    session: str
    epoch: int
    """Of the lease, or of a move under it."""
    position: int
    """Output tokens before these."""
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    """Set when the text is over."""


class Store(Protocol):
    """Where sessions and replicas are kept; one store can serve many processes.

    Every call raises `WealdError(UNAVAILABLE)` when the store cannot be reached in time, and may then have
    happened or not; all of them can be repeated.
    """

    async def create(self, record: Record) -> None:
        """Begin the journal of a session.

        Raises:
            WealdError: `ALREADY_EXISTS` when it is known; `lease` takes it over.
        """

    async def load(self, id: str) -> Record:
        """What is known of a session.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """

    async def lease(self, id: str) -> Record:
        """Take a session over: what is known of it, under a new epoch (`lease_epoch`) above all before.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """

    async def append(self, appends: Sequence[Append]) -> list[int | WealdError]:
        """Write what was committed, in order, all in one exchange; repeating a write changes nothing.

        An epoch above the known one becomes the known one, and its tokens replace all from their position on.

        Returns:
            For each the output tokens of its session now, or the session's error: `UNKNOWN_SESSION`,
            `STALE_EPOCH` when the epoch is below the known one, or `UNAVAILABLE` when the store refuses this
            one alone. A count below the position says that tokens before it are missing; nothing was written
            then.
        """

    async def register(self, replica: Replica, ttl_s: float) -> None:
        """List a replica for so many seconds; done again in time, it is the replica's heartbeat."""

    async def deregister(self, kind: ReplicaKind, address: str) -> None:
        """List a replica no longer; that it is not listed is no error."""

    async def replicas(self, kind: ReplicaKind) -> list[Replica]:
        """The replicas of one kind whose heartbeat came in time, by address."""

    async def close(self) -> None:
        """Let go of connections."""


def unknown(id: str) -> WealdError:
    """The error of a session that the store does not know."""
    return WealdError(
        ErrorCode.UNKNOWN_SESSION,
        f"session {id} is not in the journal; it has expired, or its id is wrong: send its prompt again",
    )


def stale(id: str, epoch: int, known: int) -> WealdError:
    """The error of one who writes under an epoch that has passed."""
    return WealdError(
        ErrorCode.STALE_EPOCH,
        f"session {id} has been taken over: epoch {epoch} is below {known}; stop working on it",
    )


def exists(id: str) -> WealdError:
    """The error of one who begins a session that is known."""
    return WealdError(ErrorCode.ALREADY_EXISTS, f"session {id} is known; lease it, or choose another id")
