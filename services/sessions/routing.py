"""Which replica serves a session: where its prefix lies, unless that one is overloaded."""

import hashlib
from collections.abc import Mapping, Sequence

from services.types.errors import ErrorCode, WealdError
from services.types.replica import ReplicaKind

PREFIX_TOKENS = 64
"""Sessions that share so many first tokens go to the same replica, where these are cached."""
OVERLOAD = 1.25
"""A replica is passed over when it has this many times the mean number of sessions, and one more."""


def route(kind: ReplicaKind, tokens: Sequence[int], sessions: Mapping[str, int]) -> str:
    """The address of a replica, by rendezvous hashing of the prefix, bounded by load.

    Args:
        kind: of the replicas.
        tokens: prompt and output.
        sessions: sessions on each live replica, by address.

    Raises:
        WealdError: `UNAVAILABLE` when there is none.
    """
    if not sessions:
        raise WealdError(
            ErrorCode.UNAVAILABLE,
            f"no {kind} replica is connected; start one, or retry shortly",
            retry_after_s=1,
        )
    bound = OVERLOAD * sum(sessions.values()) / len(sessions) + 1
    prefix = repr(tuple(tokens[:PREFIX_TOKENS])).encode()
    able = [address for address, count in sessions.items() if count <= bound]
    return max(able, key=lambda address: hashlib.blake2b(prefix, key=address.encode()[:64]).digest())
