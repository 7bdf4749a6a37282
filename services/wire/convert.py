"""Messages to plain values and back.

What comes in is checked: a message that cannot be what it claims raises `WealdError(INVALID_ARGUMENT)` with
the reason. On the stream, what concerns one session alone becomes that session's `Failure` instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TypeVar

from services.types.configuration import DraftConfig, Priority, TreeShape
from services.types.errors import ErrorCode, WealdError, invalid
from services.types.messages import (
    Call,
    Close,
    DraftStatus,
    Draining,
    Event,
    Failure,
    FeatureBlock,
    Features,
    Finished,
    Load,
    Moved,
    Open,
    Proposal,
    Proposals,
    Reliability,
    Replies,
    Reply,
    Request,
    Response,
    Round,
    Started,
    StepTimings,
    VerifyStatus,
)
from services.types.outcome import Outcome, TokenLogprobs
from services.types.replica import ReplicaKind
from services.types.sampling import SEED_BITS, SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from weald.v1 import draft_pb2, session_pb2, verify_pb2

T = TypeVar("T")

FINISHES: dict[FinishReason | None, session_pb2.FinishReason] = {
    None: session_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: session_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: session_pb2.FINISH_REASON_LENGTH,
}
SHAPES = {
    TreeShape.DYNAMIC: draft_pb2.TREE_SHAPE_DYNAMIC,
    TreeShape.STATIC: draft_pb2.TREE_SHAPE_STATIC,
    TreeShape.CHAIN: draft_pb2.TREE_SHAPE_CHAIN,
}
KINDS = {
    ReplicaKind.DRAFT: draft_pb2.REPLICA_KIND_DRAFT,
    ReplicaKind.VERIFY: draft_pb2.REPLICA_KIND_VERIFY,
}
PRIORITIES = {
    Priority.NORMAL: session_pb2.PRIORITY_UNSPECIFIED,
    Priority.LATENCY: session_pb2.PRIORITY_LATENCY,
    Priority.THROUGHPUT: session_pb2.PRIORITY_THROUGHPUT,
}
DTYPES = {
    "float64": session_pb2.FEATURE_DTYPE_FLOAT64,
    "float32": session_pb2.FEATURE_DTYPE_FLOAT32,
    "bfloat16": session_pb2.FEATURE_DTYPE_BFLOAT16,
}
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
CODES: dict[ErrorCode, session_pb2.ErrorCode] = {
    code: getattr(session_pb2, f"ERROR_CODE_{code.name}") for code in ErrorCode
}
PRESENT = tuple(f.name for f in session_pb2.SamplingParams.DESCRIPTOR.fields if f.has_presence)
"""Sampling parameters that have a default when absent; they have the same names on both sides."""


# The stream between draft and verify service.


def request_to_proto(request: Request) -> verify_pb2.VerifyRequest:
    """Raises `WealdError(INVALID_ARGUMENT)` for a number, or a text, that has no form on the wire."""
    with _fitting():
        match request:
            case Open():
                return verify_pb2.VerifyRequest(open=_open_to_proto(request))
            case Proposals():
                return verify_pb2.VerifyRequest(proposals=_proposals_to_proto(request))
            case Close(session, epoch):
                return verify_pb2.VerifyRequest(close=verify_pb2.Close(session=session, epoch=epoch))


def requests_from_proto(message: verify_pb2.VerifyRequest) -> list[Request | Failure]:
    """What one message asks: the request, and a failure for each session whose part of it is malformed.

    Raises:
        WealdError: `INVALID_ARGUMENT` when nothing in the message can be trusted.
    """
    match message.WhichOneof("request"):
        case "open":
            opened = message.open
            try:
                return [_open_from_proto(opened)]
            except WealdError as error:
                return [Failure(opened.session, opened.epoch, error)]
        case "proposals":
            read = proposals_from_proto(message.proposals)
            trees = tuple(p for p in read if isinstance(p, Proposal))
            failures = [f for f in read if isinstance(f, Failure)]
            return [Proposals(trees), *failures]
        case "close":
            return [Close(message.close.session, message.close.epoch)]
        case _:
            raise _nothing_known(message)


def response_to_proto(response: Response) -> verify_pb2.VerifyResponse:
    """Raises `WealdError(INTERNAL)` when features of one message differ in width or dtype."""
    match response:
        case Features():
            return verify_pb2.VerifyResponse(features=_features_to_proto(response))
        case Replies():
            return verify_pb2.VerifyResponse(replies=_replies_to_proto(response))
        case Failure(session, epoch, error):
            failure = verify_pb2.Failure(session=session, epoch=epoch, error=_error_to_proto(error))
            return verify_pb2.VerifyResponse(failure=failure)
        case Draining():
            return verify_pb2.VerifyResponse(draining=verify_pb2.Draining())


def response_from_proto(message: verify_pb2.VerifyResponse) -> Response:
    """Raises `WealdError(INVALID_ARGUMENT)` when the message is malformed."""
    match message.WhichOneof("response"):
        case "features":
            return _features_from_proto(message.features)
        case "replies":
            return _replies_from_proto(message.replies)
        case "failure":
            failure = message.failure
            return Failure(failure.session, failure.epoch, _error_from_proto(failure.error))
        case "draining":
            return Draining()
        case _:
            raise _nothing_known(message)


def proposals_from_proto(message: verify_pb2.Proposals) -> list[Proposal | Failure]:
    """Each tree of a message, or why it is none; one malformed tree does not spoil the others.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the columns do not fit together.
    """
    sizes = list(message.sizes)
    edges = [max(size - 1, 0) for size in sizes]
    _expect(message, len(message.sessions), "sizes", "epochs", "rounds", "root_positions")
    _expect(message, sum(sizes), "tokens")
    _expect(message, sum(edges), "parents", "confidences")
    columns = zip(
        message.sessions,
        message.epochs,
        message.rounds,
        message.root_positions,
        _parts(message.tokens, sizes),
        _parts(message.parents, edges),
        _parts(message.confidences, edges),
        strict=True,
    )
    read: list[Proposal | Failure] = []
    for session, epoch, round, root_position, tokens, parents, confidences in columns:
        try:
            tree = DraftTree(tokens, (-1, *parents), (1.0, *confidences))
            read.append(Proposal(session, epoch, round, root_position, tree))
        except WealdError as error:
            read.append(Failure(session, epoch, error))
    return read


def _open_to_proto(opened: Open) -> verify_pb2.Open:
    session = opened.session
    return verify_pb2.Open(
        session=session.id,
        epoch=opened.epoch,
        tokens=session.tokens,
        prompt_length=len(session.prompt),
        params=_params_to_proto(session.params),
        seed=_unsigned(session.seed),
        fingerprint=opened.fingerprint,
        speculative=opened.speculative,
        features_from=opened.features_from,
        traceparent=opened.traceparent,
        priced=opened.priced,
        priority=PRIORITIES[opened.priority],
    )


def _open_from_proto(message: verify_pb2.Open) -> Open:
    prompt, output = _prompt_and_output(message)
    if message.features_from > len(message.tokens):
        raise invalid(
            f"features are wanted from position {message.features_from} on, but only {len(message.tokens)} "
            "tokens are given"
        )
    return Open(
        Session(_named(message.session), prompt, _params_from_proto(message.params), message.seed, output),
        message.epoch,
        message.fingerprint,
        message.speculative,
        message.features_from,
        message.traceparent,
        message.priced,
        _known(PRIORITIES, message.priority, "priority"),
    )


def _proposals_to_proto(proposals: Proposals) -> verify_pb2.Proposals:
    trees = [p.tree for p in proposals.proposals]
    return verify_pb2.Proposals(
        sessions=[p.session for p in proposals.proposals],
        epochs=[p.epoch for p in proposals.proposals],
        rounds=[p.round for p in proposals.proposals],
        root_positions=[p.root_position for p in proposals.proposals],
        sizes=[len(tree) for tree in trees],
        tokens=[token for tree in trees for token in tree.tokens],
        parents=[parent for tree in trees for parent in tree.parents[1:]],
        confidences=[confidence for tree in trees for confidence in tree.confidences[1:]],
    )


def _features_to_proto(features: Features) -> verify_pb2.Features:
    block = features.block
    return verify_pb2.Features(
        session=features.session,
        epoch=features.epoch,
        start=block.start,
        rows=block.rows,
        width=block.width,
        dtype=DTYPES[block.dtype],
        data=block.data,
    )


def _features_from_proto(message: verify_pb2.Features) -> Features:
    dtype = _known(DTYPES, message.dtype, "feature dtype")
    _sized(message.data, message.rows, message.width, dtype)
    block = FeatureBlock(message.start, message.rows, message.width, dtype, message.data)
    return Features(message.session, message.epoch, block)


def _replies_to_proto(value: Replies) -> verify_pb2.Replies:
    replies = value.replies
    blocks = [reply.features or FeatureBlock(0, 0, 0, "", b"") for reply in replies]
    kinds = {(block.width, block.dtype) for block in blocks if block.rows}
    if len(kinds) > 1:
        raise WealdError(
            ErrorCode.INTERNAL,
            f"features of one message must be alike in width and dtype, got {sorted(kinds)}",
        )
    width, dtype = next(iter(kinds), (0, None))
    told = [reply.outcome.logprobs for reply in replies]
    return verify_pb2.Replies(
        sessions=[reply.session for reply in replies],
        epochs=[reply.epoch for reply in replies],
        rounds=[reply.round for reply in replies],
        positions=[reply.position for reply in replies],
        token_counts=[len(reply.outcome.tokens) for reply in replies],
        tokens=[token for reply in replies for token in reply.outcome.tokens],
        accepted_counts=[len(reply.outcome.accepted) for reply in replies],
        accepted=[node for reply in replies for node in reply.outcome.accepted],
        finishes=[FINISHES[reply.outcome.finish] for reply in replies],
        nodes=[reply.nodes for reply in replies],
        wanted=[reply.wanted for reply in replies],
        turnarounds_ns=[reply.turnaround_ns for reply in replies],
        feature_starts=[block.start if block.rows else 0 for block in blocks],
        feature_rows=[block.rows for block in blocks],
        feature_width=width,
        feature_dtype=DTYPES[dtype] if dtype else session_pb2.FEATURE_DTYPE_UNSPECIFIED,
        feature_data=b"".join(block.data for block in blocks),
        timings=verify_pb2.StepTimings(
            queue_ns=value.timings.queue,
            forward_ns=value.timings.forward,
            accept_ns=value.timings.accept,
            commit_ns=value.timings.commit,
        ),
        load=_load_to_proto(value.load),
        logprob_counts=[len(logprobs) for logprobs in told] if any(told) else (),
        logprobs=_logprobs_to_proto([each for logprobs in told for each in logprobs]),
        prices=[reply.price for reply in replies],
        paces=[reply.pace for reply in replies],
        arrived_unix_ns=arrived if any(arrived := [reply.arrived_unix_ns for reply in replies]) else (),
    )


def _replies_from_proto(message: verify_pb2.Replies) -> Replies:
    _expect(
        message,
        len(message.sessions),
        *("epochs", "rounds", "positions", "token_counts", "accepted_counts", "finishes", "nodes", "wanted"),
        *("turnarounds_ns", "feature_starts", "feature_rows", "prices", "paces"),
        *(("arrived_unix_ns",) if message.arrived_unix_ns else ()),
    )
    _expect(message, sum(message.token_counts), "tokens")
    _expect(message, sum(message.accepted_counts), "accepted")
    columns = zip(
        message.sessions,
        message.epochs,
        message.rounds,
        message.positions,
        _outcomes(message),
        message.nodes,
        message.wanted,
        _blocks(message),
        message.turnarounds_ns,
        message.prices,
        message.paces,
        message.arrived_unix_ns or [0] * len(message.sessions),
        strict=True,
    )
    replies = tuple(Reply(*reply) for reply in columns)
    timings = message.timings
    return Replies(
        replies,
        StepTimings(timings.queue_ns, timings.forward_ns, timings.accept_ns, timings.commit_ns),
        _load_from_proto(message.load),
    )


def _outcomes(message: verify_pb2.Replies) -> Iterator[Outcome]:
    """What happened to each session. The nodes verified are those named, so their count has no column."""
    tokens = _parts(message.tokens, message.token_counts)
    accepted = _parts(message.accepted, message.accepted_counts)
    verified = (nodes.bit_count() for nodes in message.nodes)
    finishes = (_known(FINISHES, finish, "finish reason") for finish in message.finishes)
    return map(Outcome, tokens, accepted, verified, finishes, _told(message))


def _told(message: verify_pb2.Replies) -> Iterator[tuple[TokenLogprobs, ...]]:
    """The logprobs of each session."""
    counts = list(message.logprob_counts) or [0] * len(message.sessions)
    if message.logprob_counts:
        _expect(message, len(message.sessions), "logprob_counts")
    for told, tokens in zip(counts, message.token_counts, strict=True):
        if told not in (0, tokens):
            raise invalid(f"logprobs are told of {told} tokens where {tokens} were committed")
    return _parts(_logprobs_from_proto(message.logprobs, sum(counts)), counts)


def _blocks(message: verify_pb2.Replies) -> list[FeatureBlock | None]:
    """The features of each reply."""
    rows, data, width = list(message.feature_rows), message.feature_data, message.feature_width
    if not any(rows):
        if data:
            raise invalid(f"{len(data)} bytes of features belong to no reply")
        return [None] * len(rows)
    dtype = _known(DTYPES, message.feature_dtype, "feature dtype")
    _sized(data, sum(rows), width, dtype)
    row = width * ITEM_BYTES[dtype]
    return [
        FeatureBlock(start, count, width, dtype, data[(end - count) * row : end * row]) if count else None
        for start, count, end in zip(message.feature_starts, rows, accumulate(rows), strict=True)
    ]


# A generation.


def call_to_proto(call: Call) -> draft_pb2.GenerateRequest:
    """Raises `WealdError(INVALID_ARGUMENT)` for a number, or a text, that has no form on the wire."""
    with _fitting():
        draft = None
        if call.draft:
            draft = draft_pb2.DraftConfig(
                shape=SHAPES[call.draft.shape],
                levels=call.draft.levels,
                beam=call.draft.beam,
                budget=call.draft.budget,
                adaptive_levels=call.draft.adaptive_levels,
                adaptive_budget=call.draft.adaptive_budget,
                coupled=call.draft.coupled,
            )
        return draft_pb2.GenerateRequest(
            session=call.session,
            tokens=call.prompt + call.output,
            prompt_length=len(call.prompt),
            params=_params_to_proto(call.params),
            speculative=call.speculative,
            draft=draft,
            want_trees=call.want_trees,
            traceparent=call.traceparent,
            priority=PRIORITIES[call.priority],
            coupled=call.coupled,
        )


def call_from_proto(message: draft_pb2.GenerateRequest) -> Call:
    """Raises `WealdError(INVALID_ARGUMENT)` when the message is malformed or a parameter is out of range."""
    known = message.tokens or message.prompt_length
    prompt, output = _prompt_and_output(message) if known else ((), ())
    draft = None
    if message.HasField("draft"):
        shape = _known(SHAPES, message.draft.shape, "tree shape")
        sizes = message.draft.levels, message.draft.beam, message.draft.budget
        adaptive = message.draft.adaptive_levels, message.draft.adaptive_budget
        draft = DraftConfig(shape, *sizes, *adaptive, message.draft.coupled)
    return Call(
        _named(message.session),
        prompt,
        output,
        _params_from_proto(message.params),
        message.speculative,
        draft,
        message.want_trees,
        message.traceparent,
        _known(PRIORITIES, message.priority, "priority"),
        message.coupled if message.HasField("coupled") else None,
    )


def event_to_proto(event: Event) -> draft_pb2.GenerateResponse:
    """One event of a generation."""
    match event:
        case Started(session, seed, cached_tokens, verifier):
            started = draft_pb2.Started(
                session=session, seed=_unsigned(seed), cached_tokens=cached_tokens, verifier=verifier
            )
            return draft_pb2.GenerateResponse(started=started)
        case Round(tree=tree):
            round = draft_pb2.Round(
                position=event.position,
                tokens=event.tokens,
                drafted=event.drafted,
                verified=event.verified,
                draft_ns=event.draft_ns,
                verify_ns=event.verify_ns,
                tree=_tree_to_proto(tree) if tree else None,
                accepted=event.accepted,
                finish=FINISHES[event.finish],
                logprobs=_logprobs_to_proto(event.logprobs),
                nodes=event.nodes,
            )
            return draft_pb2.GenerateResponse(round=round)
        case Moved(kind, address, lost):
            moved = draft_pb2.Moved(kind=KINDS[kind], address=address, lost=lost)
            return draft_pb2.GenerateResponse(moved=moved)
        case Draining():
            return draft_pb2.GenerateResponse(draining=draft_pb2.DraftServiceDraining())
        case Finished(reason, prompt_tokens, output_tokens, cached_tokens):
            finished = draft_pb2.Finished(
                finish_reason=FINISHES[reason],
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            )
            return draft_pb2.GenerateResponse(finished=finished)


def event_from_proto(message: draft_pb2.GenerateResponse) -> Event:
    """Raises `WealdError(INVALID_ARGUMENT)` when the message is malformed."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(started.session, started.seed, started.cached_tokens, started.verifier)
        case "round":
            round = message.round
            return Round(
                round.position,
                tuple(round.tokens),
                round.drafted,
                round.verified,
                round.draft_ns,
                round.verify_ns,
                _tree_from_proto(round.tree) if round.HasField("tree") else None,
                tuple(round.accepted),
                _known(FINISHES, round.finish, "finish reason"),
                _logprobs_from_proto(round.logprobs, len(round.tokens) if round.HasField("logprobs") else 0),
                round.nodes,
            )
        case "moved":
            moved = message.moved
            return Moved(_known(KINDS, moved.kind, "kind of replica"), moved.address, moved.lost)
        case "draining":
            return Draining()
        case "finished":
            finished = message.finished
            reason = _known(FINISHES, finished.finish_reason, "finish reason")
            if reason is None:
                raise invalid("the last event of a session gives no finish reason")
            counts = finished.prompt_tokens, finished.output_tokens, finished.cached_tokens
            return Finished(reason, *counts)
        case _:
            raise _nothing_known(message)


def _logprobs_to_proto(told: Sequence[TokenLogprobs]) -> session_pb2.Logprobs | None:
    if not told:
        return None
    return session_pb2.Logprobs(
        logprobs=[each.logprob for each in told],
        top_counts=[len(each.top) for each in told],
        top_tokens=[token for each in told for token, _ in each.top],
        top_logprobs=[logprob for each in told for _, logprob in each.top],
    )


def _logprobs_from_proto(message: session_pb2.Logprobs, tokens: int) -> tuple[TokenLogprobs, ...]:
    _expect(message, tokens, "logprobs", "top_counts")
    _expect(message, sum(message.top_counts), "top_tokens", "top_logprobs")
    tops = zip(message.top_tokens, message.top_logprobs, strict=True)
    return tuple(map(TokenLogprobs, message.logprobs, _parts(tuple(tops), message.top_counts)))


def _tree_to_proto(tree: DraftTree) -> session_pb2.DraftTree:
    return session_pb2.DraftTree(
        tokens=tree.tokens, parents=tree.parents[1:], confidences=tree.confidences[1:]
    )


def _tree_from_proto(message: session_pb2.DraftTree) -> DraftTree:
    return DraftTree(tuple(message.tokens), (-1, *message.parents), (1.0, *message.confidences))


# What replicas are and do.


def verify_status_to_proto(status: VerifyStatus) -> verify_pb2.VerifyServiceStatusResponse:
    """What a verify replica is and does."""
    return verify_pb2.VerifyServiceStatusResponse(
        model=status.model,
        fingerprint=status.fingerprint,
        dtype=status.dtype,
        device=status.device,
        tensor_parallel_size=status.tensor_parallel_size,
        max_num_seqs=status.max_num_seqs,
        max_num_batched_tokens=status.max_num_batched_tokens,
        max_model_len=status.max_model_len,
        page_size=status.page_size,
        num_pages=status.num_pages,
        load=_load_to_proto(status.load),
        counters=status.counters,
        cost=status.cost,
    )


def verify_status_from_proto(message: verify_pb2.VerifyServiceStatusResponse) -> VerifyStatus:
    """What a verify replica is and does."""
    return VerifyStatus(
        message.model,
        message.fingerprint,
        message.dtype,
        message.device,
        message.tensor_parallel_size,
        message.max_num_seqs,
        message.max_num_batched_tokens,
        message.max_model_len,
        message.page_size,
        message.num_pages,
        _load_from_proto(message.load),
        dict(message.counters),
        dict(message.cost),
    )


def draft_status_to_proto(status: DraftStatus) -> draft_pb2.DraftServiceStatusResponse:
    """What a draft replica is and does."""
    return draft_pb2.DraftServiceStatusResponse(
        model=status.model,
        fingerprint=status.fingerprint,
        dtype=status.dtype,
        device=status.device,
        running=status.running,
        num_pages=status.num_pages,
        free_pages=status.free_pages,
        verifiers=status.verifiers,
        counters=status.counters,
        cost=status.cost,
        reliability=[
            draft_pb2.Reliability(
                band=each.band,
                error=each.error,
                counts=each.counts,
                confidences=each.confidences,
                accepted=each.accepted,
            )
            for each in status.reliability
        ],
    )


def draft_status_from_proto(message: draft_pb2.DraftServiceStatusResponse) -> DraftStatus:
    """What a draft replica is and does."""
    return DraftStatus(
        message.model,
        message.fingerprint,
        message.dtype,
        message.device,
        message.running,
        message.num_pages,
        message.free_pages,
        dict(message.verifiers),
        dict(message.counters),
        dict(message.cost),
        tuple(map(_reliability_from_proto, message.reliability)),
    )


def _reliability_from_proto(message: draft_pb2.Reliability) -> Reliability:
    _expect(message, len(message.counts), "confidences", "accepted")
    columns = tuple(message.counts), tuple(message.confidences), tuple(message.accepted)
    return Reliability(message.band, message.error, *columns)


# What several messages share.


def _params_to_proto(params: SamplingParams) -> session_pb2.SamplingParams:
    values = {name: getattr(params, name) for name in PRESENT}
    if params.seed is not None:
        values["seed"] = _unsigned(params.seed)
    return session_pb2.SamplingParams(
        **values,
        logit_bias_tokens=params.logit_bias.keys(),
        logit_biases=params.logit_bias.values(),
        stop_token_ids=params.stop_token_ids,
    )


def _params_from_proto(message: session_pb2.SamplingParams) -> SamplingParams:
    _expect(message, len(message.logit_bias_tokens), "logit_biases")
    bias = dict(zip(message.logit_bias_tokens, message.logit_biases, strict=True))
    if len(bias) < len(message.logit_bias_tokens):
        raise invalid("logit_bias_tokens names a token more than once")
    return SamplingParams(
        **{name: getattr(message, name) for name in PRESENT if message.HasField(name)},
        logit_bias=bias,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def _prompt_and_output(
    message: verify_pb2.Open | draft_pb2.GenerateRequest,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens, end = tuple(message.tokens), message.prompt_length
    if not 1 <= end <= len(tokens):
        raise invalid(f"prompt_length must be in [1, {len(tokens)}], the number of tokens, got {end}")
    return tokens[:end], tokens[end:]


def _named(session: str) -> str:
    if not session:
        raise invalid("the session has no id; give it one")
    return session


def _load_to_proto(load: Load) -> session_pb2.Load:
    return session_pb2.Load(running=load.running, waiting=load.waiting, free_pages=load.free_pages)


def _load_from_proto(message: session_pb2.Load) -> Load:
    return Load(message.running, message.waiting, message.free_pages)


def _error_to_proto(error: WealdError) -> session_pb2.Error:
    return session_pb2.Error(code=CODES[error.code], message=error.message, retry_after_s=error.retry_after_s)


def _error_from_proto(message: session_pb2.Error) -> WealdError:
    # An error must not be lost because a later version has a word of its own for it.
    code = next((code for code, number in CODES.items() if number == message.code), ErrorCode.INTERNAL)
    wait = message.retry_after_s if message.HasField("retry_after_s") else None
    return WealdError(code, message.message, retry_after_s=wait)


def _unsigned(seed: int) -> int:
    return seed % (1 << SEED_BITS)


def _known(table: Mapping[T, int], number: int, what: str) -> T:
    """The value a number of an enumeration stands for."""
    for value, known in table.items():
        if known == number:
            return value
    raise invalid(f"{what} {number} is not known here")


def _expect(message: object, entries: int, *columns: str) -> None:
    """Refuse a message in which a column has another number of entries."""
    for column in columns:
        found = len(getattr(message, column))
        if found != entries:
            raise invalid(f"column {column} has {found} entries where {entries} belong")


def _parts(column: Sequence[T], counts: Sequence[int]) -> Iterator[tuple[T, ...]]:
    """Consecutive parts of a column, of so many entries each."""
    values = tuple(column)
    return (values[start:end] for start, end in pairwise(accumulate(counts, initial=0)))


def _sized(data: bytes, rows: int, width: int, dtype: str) -> None:
    expected = rows * width * ITEM_BYTES[dtype]
    if len(data) != expected:
        raise invalid(f"{rows} rows of {width} {dtype} values take {expected} bytes, got {len(data)}")


def _nothing_known(message: object) -> WealdError:
    return invalid(f"a {type(message).__name__} says nothing that is known here")


@contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise invalid(f"a value has no form on the wire: {error}") from error
