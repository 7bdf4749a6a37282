"""A replica as the registry lists it."""

from dataclasses import dataclass
from enum import StrEnum


class ReplicaKind(StrEnum):
    """Which service a replica is of."""

    DRAFT = "draft"
    VERIFY = "verify"
    GATEWAY = "gateway"


SIDES = (ReplicaKind.DRAFT, ReplicaKind.VERIFY)
"""Those that a session is at."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A live replica, as it says of itself with every heartbeat."""

    kind: ReplicaKind
    address: str
    """host:port at which others reach it."""
    fingerprint: bytes
    """Of its target."""
    model: str
    sessions: int = 0
    """Sessions it serves now, those that wait included."""
    draining: bool = False
    """It takes no new sessions and hands over those it has."""
    node: str = ""
    """Where it runs, as whoever placed it names the nodes."""
    metrics: str = ""
    """host:port where Prometheus can ask it; empty: nowhere."""
