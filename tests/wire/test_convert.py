import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
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
from services.types.replica import SIDES
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.wire import convert
from weald.v1 import draft_pb2, session_pb2, verify_pb2

M = TypeVar("M", bound=Message)
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
traceparents = st.sampled_from(["", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"])
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
tokens = st.lists(u32, max_size=4).map(tuple)
prompts = st.lists(u32, min_size=1, max_size=4).map(tuple)
counters = st.dictionaries(names, u64, max_size=2)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any valid tree of few nodes: each hangs below one on its predecessor's level or the level above."""
    n = draw(st.integers(1, 8))
    parents, depths = [-1], [0]
    for i in range(1, n):
        lowest = next(j for j in range(i) if depths[j] >= depths[-1] - 1)
        parents.append(draw(st.integers(lowest, i - 1)))
        depths.append(depths[parents[i]] + 1)
    tokens = draw(st.lists(u32, min_size=n, max_size=n, unique=True))
    confidences = draw(st.lists(st.floats(0, 1, width=32), min_size=n - 1, max_size=n - 1))
    return DraftTree(tuple(tokens), tuple(parents), (1.0, *confidences))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(0, 2**63))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.just(0.0) | st.floats(1e-5, 1e300)),
        top_k=draw(st.integers(0, 2**63)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.none() | u64),
        frequency_penalty=draw(st.floats(-2, 2)),
        presence_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.01, 100)),
        logit_bias=draw(st.dictionaries(u32, st.just(-math.inf) | st.floats(-100, 100), max_size=3)),
        stop_token_ids=draw(tokens),
        **draw(st.sampled_from([{}, {"ignore_eos": True}, {"json_schema": "{}"}])),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


def told(count: int) -> st.SearchStrategy[tuple[TokenLogprobs, ...]]:
    """Logprobs of so many tokens."""
    numbers = st.floats(max_value=0)
    tops = st.lists(st.tuples(u32, numbers), max_size=3).map(tuple)
    return st.lists(st.builds(TokenLogprobs, numbers, tops), min_size=count, max_size=count).map(tuple)


@st.composite
def feature_blocks(draw: st.DrawFn, width: int | None = None, dtype: str | None = None) -> FeatureBlock:
    rows = draw(st.integers(1, 3))
    width = width or draw(st.integers(1, 5))
    dtype = dtype or draw(st.sampled_from(sorted(ITEM_BYTES)))
    size = rows * width * ITEM_BYTES[dtype]
    return FeatureBlock(draw(u32), rows, width, dtype, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def reply_lists(draw: st.DrawFn) -> tuple[Reply, ...]:
    """Replies of one message: their features are of one width and dtype."""
    width, dtype = draw(st.integers(1, 5)), draw(st.sampled_from(sorted(ITEM_BYTES)))
    replies = []
    for _ in range(draw(st.integers(0, 4))):
        nodes = draw(u64)
        finish = draw(st.sampled_from([None, *FinishReason]))
        committed = draw(tokens)
        logprobs = draw(st.just(()) | told(len(committed)))
        outcome = Outcome(committed, draw(tokens), nodes.bit_count(), finish, logprobs)
        block = draw(st.none() | feature_blocks(width, dtype))
        key = draw(names), draw(u64), draw(u32), draw(u32)
        replies.append(Reply(*key, outcome, nodes, draw(st.booleans()), block, draw(u64)))
    return tuple(replies)


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    committed = draw(tokens)
    sizes = draw(st.tuples(u32, u32, u64, u64))
    finish = draw(st.sampled_from([None, *FinishReason]))
    logprobs = draw(st.just(()) | told(len(committed)))
    tree, nodes = draw(st.none() | trees()), draw(u64)
    return Round(draw(u32), committed, *sizes, tree, draw(tokens), finish, logprobs, nodes)


sessions = st.builds(Session, names, prompts, sampling_params(), u64, tokens)
opens = st.builds(
    lambda session, share, *rest: Open(session, *rest[:3], int(share * len(session.tokens)), rest[3]),
    sessions,
    st.floats(0, 1),
    u64,
    st.binary(),
    st.booleans(),
    traceparents,
)
proposals = st.builds(
    Proposals,
    st.lists(st.builds(Proposal, names, u64, u32, u32, trees()), max_size=4).map(tuple),
)
requests: st.SearchStrategy[Request] = st.one_of(opens, proposals, st.builds(Close, names, u64))
loads = st.builds(Load, u32, u32, u32)
errors = st.builds(
    lambda code, message, wait: WealdError(code, message, retry_after_s=wait),
    st.sampled_from(list(ErrorCode)),
    names,
    st.none() | st.floats(0, 1e9),
)
responses: st.SearchStrategy[Features | Replies | Draining] = st.one_of(
    st.just(Draining()),
    st.builds(Features, names, u64, feature_blocks()),
    st.builds(Replies, reply_lists(), st.builds(StepTimings, u64, u64, u64, u64), loads),
)
draft_configs = st.builds(
    DraftConfig,
    st.sampled_from(TreeShape),
    st.integers(1, 2**32 - 1),
    st.integers(1, 2**32 - 1),
    st.integers(1, 64),
)
calls = st.builds(
    lambda id, text, *rest: Call(id, *text, *rest),
    names,
    st.tuples(prompts, tokens) | st.just(((), ())),
    sampling_params(),
    st.booleans(),
    st.none() | draft_configs,
    st.booleans(),
    traceparents,
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Started, names, u64, u32, names),
    rounds(),
    st.builds(Moved, st.sampled_from(SIDES), names, st.booleans()),
    st.just(Draining()),
    st.builds(Finished, st.sampled_from(FinishReason), u32, u32, u32),
)
verify_statuses = st.builds(
    VerifyStatus, names, st.binary(), names, names, u32, u32, u32, u32, u32, u32, loads, counters
)
draft_statuses = st.builds(
    DraftStatus,
    names,
    st.binary(),
    names,
    names,
    u32,
    u32,
    u32,
    st.dictionaries(names, st.booleans(), max_size=2),
    counters,
)


def sent(message: M) -> M:
    """The message after its journey as bytes."""
    return type(message).FromString(message.SerializeToString())


def same(one: WealdError, other: WealdError) -> bool:
    return (one.code, one.message, one.retry_after_s) == (other.code, other.message, other.retry_after_s)


def refusal(read: Callable[[Any], object], message: Message) -> str:
    """Why a message is refused."""
    with pytest.raises(WealdError) as raised:
        read(sent(message))
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    return raised.value.message


@given(request=requests)
def test_a_request_arrives_as_it_was_sent(request: Request) -> None:
    assert convert.requests_from_proto(sent(convert.request_to_proto(request))) == [request]


@given(response=responses)
def test_a_response_arrives_as_it_was_sent(response: Response) -> None:
    assert convert.response_from_proto(sent(convert.response_to_proto(response))) == response


@given(session=names, epoch=u64, error=errors)
def test_the_failure_of_a_session_arrives_with_code_sentence_and_wait(
    session: str, epoch: int, error: WealdError
) -> None:
    message = sent(convert.response_to_proto(Failure(session, epoch, error)))
    arrived = convert.response_from_proto(message)
    assert isinstance(arrived, Failure)
    assert (arrived.session, arrived.epoch) == (session, epoch)
    assert same(arrived.error, error)


@given(call=calls)
def test_a_call_arrives_as_it_was_sent(call: Call) -> None:
    assert convert.call_from_proto(sent(convert.call_to_proto(call))) == call


@given(event=events)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    assert convert.event_from_proto(sent(convert.event_to_proto(event))) == event


@given(verify=verify_statuses, draft=draft_statuses)
def test_a_status_arrives_as_it_was_sent(verify: VerifyStatus, draft: DraftStatus) -> None:
    assert convert.verify_status_from_proto(sent(convert.verify_status_to_proto(verify))) == verify
    assert convert.draft_status_from_proto(sent(convert.draft_status_to_proto(draft))) == draft


def test_every_code_dtype_shape_and_finish_has_a_number_of_its_own() -> None:
    assert set(convert.CODES.values()) | {0} == set(session_pb2.ErrorCode.values())
    assert set(convert.DTYPES.values()) | {0} == set(session_pb2.FeatureDtype.values())
    assert set(convert.FINISHES.values()) == set(session_pb2.FinishReason.values())
    assert set(convert.SHAPES.values()) | {0} == set(draft_pb2.TreeShape.values())
    assert convert.CODES.keys() == set(ErrorCode)
    assert convert.SHAPES.keys() == set(TreeShape)
    assert set(convert.KINDS.values()) | {0} == set(draft_pb2.ReplicaKind.values())
    assert convert.KINDS.keys() == set(SIDES)
    assert convert.FINISHES.keys() == {None, *FinishReason}
    for table in (convert.CODES, convert.DTYPES, convert.FINISHES, convert.KINDS, convert.SHAPES):
        assert len(set(table.values())) == len(table)


def test_every_sampling_parameter_travels_and_one_that_is_absent_has_its_default() -> None:
    travelling = {*convert.PRESENT, "logit_bias", "stop_token_ids"}
    assert travelling == {field.name for field in fields(SamplingParams)}
    message = draft_pb2.GenerateRequest(session="s", tokens=[1], prompt_length=1)
    assert convert.call_from_proto(message) == Call("s", (1,), (), SamplingParams(), speculative=False)


def test_a_seed_travels_modulo_its_64_bits() -> None:
    opened = Open(Session("s", (1,), SamplingParams(seed=-1), 2**64 + 5), 0, b"", True, 0)
    (arrived,) = convert.requests_from_proto(convert.request_to_proto(opened))
    assert isinstance(arrived, Open)
    assert (arrived.session.seed, arrived.session.params.seed) == (5, 2**64 - 1)


def test_confidences_travel_as_float32_and_the_root_has_none() -> None:
    tree = DraftTree((1, 2), (-1, 0), (1.0, 0.1))
    message = convert.request_to_proto(Proposals((Proposal("s", 0, 0, 0, tree),)))
    assert list(message.proposals.confidences) == [pytest.approx(0.1, rel=1e-7)]
    assert list(message.proposals.parents) == [0]


def test_an_empty_block_of_features_travels_as_none() -> None:
    block = FeatureBlock(7, 0, 4, "float32", b"")
    reply = Reply("s", 0, 0, 0, Outcome((1,), (), 1, None), 1, True, block, 0)
    arrived = convert.response_from_proto(convert.response_to_proto(Replies((reply,), StepTimings(), Load())))
    assert isinstance(arrived, Replies)
    assert arrived.replies[0].features is None


def test_features_of_two_widths_in_one_message_are_our_own_fault() -> None:
    def reply(width: int) -> Reply:
        block = FeatureBlock(0, 1, width, "float32", bytes(4 * width))
        return Reply("s", 0, 0, 0, Outcome((1,), (), 1, None), 1, True, block, 0)

    with pytest.raises(WealdError, match="alike in width and dtype") as raised:
        convert.response_to_proto(Replies((reply(1), reply(2)), StepTimings(), Load()))
    assert raised.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    "call",
    [
        Call("s", (-1,), (), SamplingParams()),
        Call("s", (2**32,), (), SamplingParams()),
        Call("s", (1,), (), SamplingParams(max_tokens=2**64)),
        Call("\ud800", (1,), (), SamplingParams()),
    ],
)
def test_a_value_that_the_wire_cannot_carry_is_refused_before_it_is_sent(call: Call) -> None:
    with pytest.raises(WealdError, match="a value has no form on the wire") as raised:
        convert.call_to_proto(call)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


# Malformed messages.


def three_proposals() -> verify_pb2.Proposals:
    """Trees of one, two and three nodes."""
    found = tuple(Proposal(f"s{n}", n, n, n, DraftTree.chain(range(n))) for n in (1, 2, 3))
    return convert.request_to_proto(Proposals(found)).proposals


def two_replies() -> verify_pb2.Replies:
    """One with features, one without."""
    block = FeatureBlock(3, 2, 4, "bfloat16", bytes(range(16)))
    told = tuple(TokenLogprobs(-1.5, ((token, -1.5), (9, -2.0))) for token in (5, 6))
    found = (
        Reply("a", 1, 1, 4, Outcome((5, 6), (2,), 3, None, told), 0b111, True, block, 9, arrived_unix_ns=5),
        Reply("b", 1, 1, 4, Outcome((5,), (), 1, FinishReason.STOP), 1, False, None, 0),
    )
    return convert.response_to_proto(Replies(found, StepTimings(), Load())).replies


def columns_of(message: Message) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.fields if field.is_repeated]


@pytest.mark.parametrize("column", columns_of(verify_pb2.Proposals()))
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_columns_of_proposals_that_do_not_fit_together_are_refused(column: str, change: str) -> None:
    message = three_proposals()
    entries = getattr(message, column)
    if change == "one more":
        entries.append(entries[-1])
    else:
        entries.pop()
    named = {"sessions": "sizes"}.get(column, column)
    assert refusal(convert.requests_from_proto, verify_pb2.VerifyRequest(proposals=message)).startswith(
        f"column {named} has"
    )


def test_a_malformed_tree_fails_its_session_and_no_other() -> None:
    message = three_proposals()
    message.parents[2] = 2
    first, _, third = convert.proposals_from_proto(three_proposals())
    read = convert.requests_from_proto(sent(verify_pb2.VerifyRequest(proposals=message)))
    assert isinstance(read[0], Proposals)
    assert [p.session for p in read[0].proposals] == ["s1", "s2"]
    failure = read[1]
    assert isinstance(failure, Failure)
    assert (failure.session, failure.epoch) == ("s3", 3)
    assert same(
        failure.error, WealdError(ErrorCode.INVALID_ARGUMENT, "node 2 needs a parent in [0, 2), got 2")
    )
    assert [first] == [read[0].proposals[0]]
    assert isinstance(third, Proposal)


@pytest.mark.parametrize(
    ("sizes", "tokens", "parents", "confidences", "reason"),
    [
        ([0], [], [], [], "a draft tree has 1 to 64 nodes, got 0"),
        ([65], range(65), range(64), [1] * 64, "a draft tree has 1 to 64 nodes, got 65"),
        ([2], [1, 2], [1], [1], "node 1 needs a parent in [0, 1), got 1"),
        ([3], [1, 2, 2], [0, 0], [1, 1], "siblings of a draft tree must carry different tokens"),
        ([4], [1, 2, 3, 4], [0, 1, 0], [1] * 3, "nodes of a draft tree must be in breadth-first order"),
        ([2], [1, 2], [0], [1.5], "confidences of a draft tree must be in [0, 1]"),
        ([2], [1, 2], [0], [math.nan], "confidences of a draft tree must be in [0, 1]"),
    ],
)
def test_a_proposal_that_is_no_tree_is_refused_with_the_reason(
    sizes: list[int], tokens: list[int], parents: list[int], confidences: list[float], reason: str
) -> None:
    message = verify_pb2.Proposals(
        sessions=["s"],
        epochs=[2],
        rounds=[0],
        root_positions=[0],
        sizes=sizes,
        tokens=tokens,
        parents=parents,
        confidences=confidences,
    )
    (failure,) = convert.proposals_from_proto(sent(message))
    assert isinstance(failure, Failure)
    assert (failure.session, failure.epoch, failure.error.message) == ("s", 2, reason)
    tree = session_pb2.DraftTree(tokens=tokens, parents=parents, confidences=confidences)
    if sizes != [0]:
        event = draft_pb2.GenerateResponse(round=draft_pb2.Round(tree=tree))
        assert refusal(convert.event_from_proto, event) == reason


@pytest.mark.parametrize("column", columns_of(verify_pb2.Replies()))
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_columns_of_replies_that_do_not_fit_together_are_refused(column: str, change: str) -> None:
    message = two_replies()
    entries = getattr(message, column)
    if change == "one more":
        entries.append(entries[-1])
    else:
        entries.pop()
    named = {"sessions": "epochs"}.get(column, column)
    response = verify_pb2.VerifyResponse(replies=message)
    assert refusal(convert.response_from_proto, response).startswith(f"column {named} has")


@pytest.mark.parametrize("column", columns_of(session_pb2.Logprobs()))
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_columns_of_logprobs_that_do_not_fit_together_are_refused(column: str, change: str) -> None:
    message = two_replies()
    entries = getattr(message.logprobs, column)
    if change == "one more":
        entries.append(entries[-1])
    else:
        entries.pop()
    refused = f"column {column} has"
    response = verify_pb2.VerifyResponse(replies=message)
    assert refusal(convert.response_from_proto, response).startswith(refused)
    event = draft_pb2.GenerateResponse(round=draft_pb2.Round(tokens=[5, 6], logprobs=message.logprobs))
    assert refusal(convert.event_from_proto, event).startswith(refused)


def replies_with(**changes: Any) -> verify_pb2.VerifyResponse:
    message = two_replies()
    for name, value in changes.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        elif isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return verify_pb2.VerifyResponse(replies=message)


def features_with(**changes: Any) -> verify_pb2.VerifyResponse:
    block = FeatureBlock(3, 2, 4, "float32", bytes(32))
    response = convert.response_to_proto(Features("s", 1, block))
    for name, value in changes.items():
        setattr(response.features, name, value)
    return response


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (verify_pb2.VerifyResponse(), "a VerifyResponse says nothing that is known here"),
        (features_with(data=bytes(31)), "2 rows of 4 float32 values take 32 bytes, got 31"),
        (features_with(rows=3), "3 rows of 4 float32 values take 48 bytes, got 32"),
        (features_with(width=0), "2 rows of 0 float32 values take 0 bytes, got 32"),
        (features_with(dtype=0), "feature dtype 0 is not known here"),
        (features_with(dtype=99), "feature dtype 99 is not known here"),
        (replies_with(finishes=[0, 99]), "finish reason 99 is not known here"),
        (replies_with(feature_dtype=98), "feature dtype 98 is not known here"),
        (replies_with(feature_width=3), "2 rows of 3 bfloat16 values take 12 bytes, got 16"),
        (replies_with(feature_data=b""), "2 rows of 4 bfloat16 values take 16 bytes, got 0"),
        (replies_with(feature_rows=[0, 0]), "16 bytes of features belong to no reply"),
        (replies_with(logprob_counts=[1, 0]), "logprobs are told of 1 tokens where 2 were committed"),
        (replies_with(logprob_counts=[]), "column logprobs has 2 entries where 0 belong"),
        (replies_with(logprob_counts=[2, 1]), "column logprobs has 2 entries where 3 belong"),
        (replies_with(logprobs=session_pb2.Logprobs()), "column logprobs has 0 entries where 2 belong"),
    ],
)
def test_a_malformed_response_is_refused_with_the_reason(
    response: verify_pb2.VerifyResponse, reason: str
) -> None:
    assert refusal(convert.response_from_proto, response) == reason


def open_with(**changes: Any) -> verify_pb2.Open:
    session = Session("s", (1, 2), SamplingParams(), 3, (4,))
    message = convert.request_to_proto(Open(session, 5, b"f", True, 0)).open
    for name, value in changes.items():
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def generate_with(**changes: Any) -> draft_pb2.GenerateRequest:
    message = draft_pb2.GenerateRequest(session="s", tokens=[1, 2, 4], prompt_length=2)
    for name, value in changes.items():
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


Params = session_pb2.SamplingParams


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"session": ""}, "the session has no id; give it one"),
        ({"prompt_length": 0}, "prompt_length must be in [1, 3], the number of tokens, got 0"),
        ({"prompt_length": 4}, "prompt_length must be in [1, 3], the number of tokens, got 4"),
        ({"params": Params(top_p=0)}, "top_p must be in (0, 1], got 0.0"),
        ({"params": Params(temperature=math.nan)}, "temperature must be 0 (greedy) or"),
        ({"params": Params(logprobs=21)}, "logprobs must be in [0, 20], got 21"),
        (
            {"params": Params(json_schema="{}", ignore_eos=True)},
            "json_schema and ignore_eos exclude each other",
        ),
        ({"params": Params(logit_bias_tokens=[1])}, "column logit_biases has 0 entries where 1 belong"),
        (
            {"params": Params(logit_bias_tokens=[1, 1], logit_biases=[0, 0])},
            "logit_bias_tokens names a token more than once",
        ),
    ],
)
def test_a_session_that_cannot_be_is_refused_with_the_reason_and_fails_alone(
    changes: dict[str, Any], reason: str
) -> None:
    assert refusal(convert.call_from_proto, generate_with(**changes)).startswith(reason)
    (failure,) = convert.requests_from_proto(verify_pb2.VerifyRequest(open=open_with(**changes)))
    assert isinstance(failure, Failure)
    assert (failure.session, failure.epoch) == (changes.get("session", "s"), 5)
    assert failure.error.message.startswith(reason)


def test_features_cannot_be_wanted_from_behind_the_last_token() -> None:
    (failure,) = convert.requests_from_proto(verify_pb2.VerifyRequest(open=open_with(features_from=4)))
    assert isinstance(failure, Failure)
    assert failure.error.message == "features are wanted from position 4 on, but only 3 tokens are given"


def test_an_unknown_tree_shape_is_refused() -> None:
    draft = draft_pb2.DraftConfig(shape=draft_pb2.TREE_SHAPE_UNSPECIFIED, levels=1, beam=1, budget=1)
    assert refusal(convert.call_from_proto, generate_with(draft=draft)) == "tree shape 0 is not known here"


def test_tree_sizes_out_of_range_are_refused() -> None:
    draft = draft_pb2.DraftConfig(shape=draft_pb2.TREE_SHAPE_DYNAMIC, levels=0, beam=1, budget=1)
    assert (
        refusal(convert.call_from_proto, generate_with(draft=draft)) == "a tree needs at least 1 level, got 0"
    )


def test_an_end_without_a_reason_is_refused() -> None:
    message = draft_pb2.GenerateResponse(finished=draft_pb2.Finished())
    assert refusal(convert.event_from_proto, message) == "the last event of a session gives no finish reason"


def test_a_message_of_a_later_version_is_refused_as_unknown_but_its_errors_are_kept() -> None:
    nothing = "says nothing that is known here"
    assert refusal(convert.requests_from_proto, verify_pb2.VerifyRequest()).endswith(nothing)
    assert refusal(convert.event_from_proto, draft_pb2.GenerateResponse()).endswith(nothing)
    failure = convert.response_to_proto(Failure("s", 1, WealdError(ErrorCode.STALE_EPOCH, "why")))
    failure.failure.error.code = 99  # type: ignore[assignment]
    arrived = convert.response_from_proto(sent(failure))
    assert isinstance(arrived, Failure)
    assert (arrived.error.code, arrived.error.message) == (ErrorCode.INTERNAL, "why")
