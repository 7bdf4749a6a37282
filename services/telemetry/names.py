"""The name of every span, attribute and metric; what there is a convention for is called as there."""

from enum import StrEnum
from typing import NamedTuple


class SpanName(StrEnum):
    """One trace per request: the request, `generate`, a `round` for each target step, its parts."""

    GENERATE = "generate"
    """A call of a draft replica: from its lease to its last event."""
    ROUND = "round"
    """From the arrival of one reply at the draft replica to that of the next; the first is the prefill."""
    EXTEND = "extend"
    """With the next two, of all sessions that were drafted together."""
    GROW = "grow"
    RERANK = "rerank"
    LINK = "link"
    """A tree, or a reply, on its way; from the clock of one end to that of the other."""
    QUEUE = "queue"
    """From the arrival of the tree to the start of the target step."""
    FORWARD = "forward"
    """With the next two, of all sessions that shared the step; links to the rounds of the others."""
    ACCEPT = "accept"
    COMMIT = "commit"
    REPLY = "reply"
    """From the commit to the sending of the reply: features, and what the session gets next."""


class Attribute(StrEnum):
    """What spans tell. Counts are of nodes or tokens."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    MODEL = "gen_ai.request.model"
    TEMPERATURE = "gen_ai.request.temperature"
    SEED = "gen_ai.request.seed"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    CHOICES = "gen_ai.request.choice.count"
    RESPONSE = "gen_ai.response.id"
    FINISH = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    ERROR = "error.type"

    SESSION = "weald.session.id"
    EPOCH = "weald.session.epoch"
    CACHED_TOKENS = "weald.session.cached_tokens"
    VERIFIER = "weald.verifier.address"
    ROUNDS = "weald.rounds"
    TAU = "weald.tau"

    ROUND = "weald.round.number"
    POSITION = "weald.round.position"
    """Absolute, of the first token committed."""
    TOKENS = "weald.round.tokens"
    """Their ids; only where content is asked for."""
    COMMITTED = "weald.round.committed"
    ACCEPTED = "weald.round.accepted_length"

    DRAFTED = "weald.tree.nodes_drafted"
    """Root included, as the next two."""
    VERIFIED = "weald.tree.nodes_verified"
    BUDGET = "weald.tree.budget"
    COUPLED = "weald.tree.coupled"
    PARENTS = "weald.tree.parents"
    CONFIDENCES = "weald.tree.confidences"
    STOOD = "weald.tree.verified"
    """Which nodes stood in the step."""
    PATH = "weald.tree.accepted"
    """Which were accepted."""
    NODES = "weald.tree.tokens"
    """Token ids of all nodes; only where content is asked for."""

    DIRECTION = "weald.link.direction"
    """`up` to the verify replica, `down` from it."""
    STEP_SESSIONS = "weald.step.sessions"
    STEP_TOKENS = "weald.step.tokens"

    MOVED_KIND = "weald.moved.kind"
    MOVED_TO = "weald.moved.address"
    MOVED_LOST = "weald.moved.lost"
    """Whether the one before was gone, rather than handed it over."""
    REASON = "weald.reason"


class EventName(StrEnum):
    """What happens within a span."""

    LOST = "weald.lost"
    """The session's verify replica is gone, refuses it, or is about to go."""
    MOVED = "weald.moved"
    """The session goes on at another replica."""


class Metric(NamedTuple):
    """A metric of a replica; names are those of vLLM where it has the same, with our prefix."""

    name: str
    what: str
    counts: bool = True
    """Whether it only grows; Prometheus adds `_total` to its name."""
    labels: tuple[str, ...] = ()


DRAFTS = Metric("weald_spec_decode_num_drafts", "Rounds with a draft tree.")
DRAFT_TOKENS = Metric("weald_spec_decode_num_draft_tokens", "Draft tokens that were verified.")
ACCEPTED_TOKENS = Metric("weald_spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
ACCEPTED_PER_POSITION = Metric(
    "weald_spec_decode_num_accepted_tokens_per_pos",
    "Likewise, by depth in the tree, from 0.",
    labels=("position",),
)
OFFERED = Metric("weald_forest_offered_nodes", "Draft nodes that competed for places in steps.")
RATE = Metric("weald_price_tokens_per_second", "What a second of the target is worth, in tokens.", False)
PLAIN_STEPS = Metric("weald_plain_steps", "Rounds of one session without a draft tree.")
STALE_TREES = Metric("weald_stale_trees", "Trees that came too late.")
MISSED_TREES = Metric("weald_missed_trees", "Trees that were waited for in vain.")
SHRUNK_TREES = Metric("weald_shrunk_trees", "Trees cut for want of tokens or pages.")
STEPS = Metric("weald_steps", "Target steps.")
STEP_TIME = Metric("weald_step_time_seconds", "Time in target steps.")
FORWARD_TIME = Metric("weald_forward_time_seconds", "Of these in the target's forward.")
STEP_COST = Metric(
    "weald_step_cost_seconds", "T(N): what a target step of N tokens takes.", False, ("tokens",)
)
TOKENS_FORWARDED = Metric("weald_tokens_forwarded", "Tokens that entered target steps, or head passes.")
TOKENS_PREFILLED = Metric("weald_tokens_prefilled", "Of these in prefills.")
PREFIX_HITS = Metric("weald_prefix_cache_hits", "Tokens found in the prefix cache.")
PREEMPTIONS = Metric("weald_num_preemptions", "Sessions that lost their pages for a while.")
EXPIRED = Metric("weald_expired_sessions", "Sessions that no drafter came back for.")
RUNNING = Metric("weald_num_sessions_running", "Sessions that are served.", False)
WAITING = Metric("weald_num_sessions_waiting", "Sessions that wait for their turn.", False)
KV_USAGE = Metric("weald_kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", False)
LOOP_LAG = Metric("weald_loop_lag_seconds", "The longest that the event loop was late.", False)
TREES = Metric("weald_trees_drafted", "Draft trees that were proposed.")
TREES_COUPLED = Metric("weald_trees_coupled", "Of these, ranked by the noise of the draws.")
DRAFT_TIME = Metric("weald_draft_time_seconds", "Time of drafting.")
PASS_COST = Metric("weald_pass_cost_seconds", "What a head pass of N rows takes.", False, ("rows",))
NODES_DECIDED = Metric("weald_nodes_decided", "Draft tokens that the target said yes or no to.")
RETIRED = Metric("weald_retired_sessions", "Sessions that the head has no pages for.")
RECOVERED = Metric("weald_recovered_sessions", "Sessions that went on when their verify replica was lost.")
HANDED_OVER = Metric("weald_handed_over_sessions", "Sessions that left a verify replica that drained.")
FENCED = Metric("weald_fenced_sessions", "Sessions that another draft replica had taken over.")
JOURNAL_WRITES = Metric("weald_journal_writes", "Exchanges with the store that wrote.")
JOURNAL_TOKENS = Metric("weald_journal_tokens", "Tokens that these wrote.")
JOURNAL_FAILURES = Metric("weald_journal_failures", "Exchanges with the store that failed.")
JOURNAL_BACKLOG = Metric("weald_journal_backlog_tokens", "Tokens that the store has not taken yet.", False)
CALIBRATION_ERROR = Metric(
    "weald_calibration_error", "Mean distance of confidence and share accepted.", False, ("band",)
)
VERIFIERS = Metric("weald_verifiers_connected", "Verify replicas that can serve sessions.", False)
