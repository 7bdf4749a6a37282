"""What the services say to each other, as plain values; `services.wire` turns them into protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.types.configuration import DraftConfig, Priority
from services.types.errors import WealdError
from services.types.outcome import Outcome, TokenLogprobs
from services.types.replica import ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
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
    priced: bool = False
    """Whether trees and nodes have to be worth their time; otherwise every tree is wanted, and verified whole
    where it has a place.
    """
    priority: Priority = Priority.NORMAL


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
    price: float = 0.0
    """Value that a node of the next tree must have to be worth its time; 0.0 for sessions without a price."""
    pace: float = 0.0
    """Tokens per second that the session is expected to make: the price of a second that its tree takes."""
    arrived_unix_ns: int = 0
    """When the tree arrived, by the verifier's clock; 0 unless the session is traced."""


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


@dataclass(frozen=True, slots=True)
class Failure:
    """One session's error. A session of this epoch, if there was one, is closed."""

    session: str
    epoch: int
    error: WealdError


@dataclass(frozen=True, slots=True)
class Draining:
    """The replica goes away: it takes no new sessions, and those it has should move while it still serves."""


Response = Features | Replies | Failure | Draining


@dataclass(frozen=True, slots=True)
class Call:
    """What a draft service is asked to generate: a new session, or the rest of one served elsewhere."""

    session: str
    prompt: tuple[int, ...]
    """Empty where only the journal knows the session: then it gives prompt, parameters and seed, too."""
    output: tuple[int, ...]
    """Tokens delivered so far; the generation goes on behind them."""
    params: SamplingParams
    """Without a seed the service draws one."""
    speculative: bool = True
    draft: DraftConfig | None = None
    """Sizes of the trees; None: the service's own."""
    want_trees: bool = False
    """Whether every `Round` brings its tree."""
    traceparent: str = ""
    priority: Priority = Priority.NORMAL
    coupled: bool | None = None
    """Whether candidates are ranked by the noise of the draws; None: as `draft` or the service has it."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a generation."""

    session: str
    seed: int
    """The seed in use; a resumption must name it."""
    cached_tokens: int
    """Prompt tokens whose keys and values the draft service had already."""
    verifier: str
    """host:port of the verify replica that serves the session at first."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one target step committed, or what the journal had of the session; one event of a generation."""

    position: int
    """Absolute position of the first token committed."""
    tokens: tuple[int, ...]
    """The accepted path, then the bonus token, cut at the finish."""
    drafted: int
    """Nodes of the tree proposed, root included; 0 for a plain step without one."""
    verified: int
    """Nodes that stood in the target step, root included; 0 for tokens from the journal."""
    draft_ns: int
    """Of extending, growing and reranking; 0 without a tree."""
    verify_ns: int
    """From the sending of the tree, or from the last reply, to the arrival of this round's."""
    tree: DraftTree | None = None
    """The tree proposed, if the call wants trees."""
    accepted: tuple[int, ...] = ()
    """Indices of the accepted nodes in the tree proposed; parallel to the first tokens."""
    finish: FinishReason | None = None
    """Set by the round that ended the session: its last token is an end token, or the last one allowed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Parallel to `tokens` where the call asks for them; empty for those of the journal, which keeps none."""
    nodes: int = 0
    """Bit i is set when node i of `tree` stood in the target step; 0 without it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A session goes on at another replica, without a change to its text."""

    kind: ReplicaKind
    """Which side of it moved."""
    address: str
    """host:port of the replica that serves it now."""
    lost: bool
    """Whether the one before was lost; otherwise it was draining."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation; tokens are those of the session's whole life."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were cached when the session started here."""


Event = Started | Round | Moved | Draining | Finished


@dataclass(frozen=True, slots=True)
class VerifyStatus:
    """What a verify replica is and does."""

    model: str
    fingerprint: bytes
    dtype: str
    device: str
    tensor_parallel_size: int
    max_num_seqs: int
    """Sessions in one target step at most."""
    max_num_batched_tokens: int
    """Tokens in one target step at most."""
    max_model_len: int
    """Tokens of one session at most."""
    page_size: int
    num_pages: int
    load: Load
    counters: Mapping[str, int]
    """What has been counted since the replica started, by name of the metric."""
    cost: Mapping[int, float] = field(default_factory=dict)
    """T(N): seconds that a target step takes lately, by the tokens in it."""


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """What a draft replica is and does."""

    model: str
    fingerprint: bytes
    dtype: str
    device: str
    running: int
    """Sessions being generated."""
    num_pages: int
    free_pages: int
    verifiers: Mapping[str, bool]
    """Whether a verify replica is connected and serves the same target, by host:port."""
    counters: Mapping[str, int]
    """What has been counted since the replica started, by name of the metric."""
    cost: Mapping[int, float] = field(default_factory=dict)
    """Seconds that a head pass over growing trees takes lately, by its rows."""
    reliability: tuple["Reliability", ...] = ()


@dataclass(frozen=True, slots=True)
class Reliability:
    """What the head's confidences have been worth in sessions of one band of temperature."""

    band: str
    error: float
    """Expected calibration error: mean distance of confidence and share accepted."""
    counts: tuple[float, ...]
    """Nodes that the target decided on, by bin of confidence; old ones count less."""
    confidences: tuple[float, ...]
    """Their mean confidence, as the head gave it, ascending."""
    accepted: tuple[float, ...]
    """Share of them that was accepted."""
