"""What draft and verify service say to each other, as plain values; `services.wire` turns them into protobuf."""

from dataclasses import dataclass

from services.types.errors import WealdError
from services.types.outcome import Outcome
from services.types.session import Session
from services.types.tree import DraftTree


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """Features of consecutive positions of one session, as they travel."""

    start: int
    """Position of the first row."""
    rows: int
    width: int
    """The target's hidden size."""
    dtype: str
    """`float64`, `float32` or `bfloat16`."""
    data: bytes
    """`rows * width` values, row after row, little-endian."""


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a session at a verify replica, or take it over there with a higher epoch."""

    session: Session
    epoch: int
    fingerprint: bytes
    """Of the target the drafter's head was loaded for."""
    speculative: bool
    """False: the verifier goes on by plain steps alone, and no features travel."""
    features_from: int
    """First position whose feature the drafter lacks."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft tree for one round of one session."""

    session: str
    epoch: int
    round: int
    """The round whose reply wanted this tree."""
    root_position: int
    """Absolute position of the tree's root: a tree whose root is not pending is stale."""
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Proposals:
    """All trees that became ready together."""

    proposals: tuple[Proposal, ...]
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """End a session and free what it holds."""

    session: str
    epoch: int


Request = Open | Proposals | Close


@dataclass(frozen=True, slots=True)
class Features:
    """Features the drafter lacks, sent ahead of the outcome that wants a tree."""

    session: str
    epoch: int
    block: FeatureBlock


@dataclass(frozen=True, slots=True)
class Reply:
    """What one target step did to one session."""

    session: str
    epoch: int
    round: int
    """Target steps that committed tokens of this session since it opened here; 0 is the prefill's."""
    position: int
    """Absolute position of the first token committed."""
    outcome: Outcome
    nodes: int
    """Bit i is set when node i of the proposed tree stood in the step; bit 0 alone is a plain step."""
    wanted: bool
    """Whether the verifier now holds the session for a tree."""
    features: FeatureBlock | None
    """With `wanted`: what the drafter still lacks below the new pending token."""
    turnaround_ns: int
    """From the arrival of the tree to the sending of this reply; 0 without a tree."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one target step spent its time, nanoseconds."""

    queue: int = 0
    """From the earliest arrival of a tree in the step to its start."""
    forward: int = 0
    accept: int = 0
    commit: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a verify replica is."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0


@dataclass(frozen=True, slots=True)
class Replies:
    """What one target step did to all sessions of one stream."""

    replies: tuple[Reply, ...]
    timings: StepTimings
    load: Load
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """One session's error. A session of this epoch, if there was one, is closed."""

    session: str
    epoch: int
    error: WealdError


Response = Features | Replies | Failure
