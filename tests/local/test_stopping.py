"""A text ends exactly at an end token, exactly at `max_tokens`, exactly at the context length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from services.local.decoder import Step, decode
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.verify.verifier import Verifier

Make = Callable[..., Any]

PROMPT = (1, 2, 3)
SEED = 27
"""One whose text meets several end-of-sequence tokens, the first at the seventh token."""
EOS = frozenset({2, 7, 11})


@dataclass
class Chains:
    """Proposes the next tokens of a known sequence as one path, however much of it is still allowed."""

    sequence: Sequence[int]
    levels: int
    known: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By session: how much of the sequence is behind it, and the pending token."""

    def open(self, id: str, tokens: Sequence[int], config: Any = None, drawing: Any = None) -> int:
        self.known[id] = len(tokens), tokens[-1]
        return 0

    def propose(self, ids: Sequence[str], terms: Any = None) -> list[DraftTree]:
        known = (self.known[id] for id in ids)
        return [DraftTree.chain((root, *self.sequence[at : at + self.levels])) for at, root in known]

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        at, pending = self.known[id]
        self.known[id] = at + len(tokens), [pending, *tokens][-1]

    def learn(self, id: str, nodes: int, accepted: Sequence[int]) -> int:
        return 0

    def close(self, id: str) -> None:
        self.known.pop(id)


@pytest.fixture(scope="module")
def stream(plain: Make) -> tuple[int, ...]:
    """What the target says to the prompt when nothing ends it; it passes end-of-sequence tokens."""
    params = SamplingParams(ignore_eos=True)
    tokens: tuple[int, ...] = plain("llama").stream(Session("a", PROMPT, params, SEED), 80)
    assert len(EOS & set(tokens[5:40])) > 1
    return tokens


@pytest.fixture
def complete(
    plain: Make, target: Make, run: Make, stream: tuple[int, ...]
) -> Callable[..., tuple[tuple[int, ...], FinishReason, list[Step]]]:
    """Decode the prompt with chains of so many levels (0: without): tokens, finish and steps."""

    def complete(levels: int = 8, **params: Any) -> tuple[tuple[int, ...], FinishReason, list[Step]]:
        session = Session("a", PROMPT, SamplingParams(**params), SEED)
        drafter = Chains((*PROMPT, *stream), levels) if levels else None
        decoded = run(target("llama"), [session], drafter)
        same = params.keys() <= {"max_tokens", "ignore_eos", "stop_token_ids"}
        assert decoded["a"] == plain("llama").text(session, stream if same else None)
        return decoded["a"], decoded.finish("a"), decoded.steps

    return complete


@pytest.mark.parametrize("levels", [0, 1, 8, 63])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 8, 9, 10, 11, 64, 65])
def test_a_text_without_end_has_exactly_max_tokens(
    levels: int, max_tokens: int, complete: Make, stream: tuple[int, ...]
) -> None:
    tokens, finish, steps = complete(levels, max_tokens=max_tokens, ignore_eos=True)
    assert tokens == stream[:max_tokens]
    assert finish is FinishReason.LENGTH
    rounds = -(-max(max_tokens - 1, 0) // (levels + 1))
    assert len(steps) == 1 + rounds


@pytest.mark.parametrize("levels", [1, 4, 8, 63])
@pytest.mark.parametrize("max_tokens", [2, 5, 6, 7])
def test_nodes_that_max_tokens_cannot_use_are_not_verified(
    levels: int, max_tokens: int, complete: Make
) -> None:
    steps = complete(levels, max_tokens=max_tokens, ignore_eos=True)[2]
    left = max_tokens - 1
    for step in steps[1:]:
        assert step.outcome.verified == min(levels + 1, left)
        left -= len(step.outcome.tokens)


@pytest.mark.parametrize("levels", [0, 1, 3, 40])
@pytest.mark.parametrize("at", range(1, 12))
def test_an_end_token_is_the_last_token_wherever_in_a_path_it_stands(
    levels: int, at: int, complete: Make, stream: tuple[int, ...]
) -> None:
    ends = tuple({stream[at]} - set(stream[:at]))
    tokens, finish, steps = complete(levels, max_tokens=60, ignore_eos=True, stop_token_ids=ends)
    if ends:
        assert tokens == stream[: at + 1]
        assert finish is FinishReason.STOP
        last = steps[-1].outcome
        assert last.accepted == tuple(range(1, len(last.accepted) + 1))
        assert len(last.tokens) - len(last.accepted) == (at % (levels + 1) == 0)


def test_an_end_in_the_middle_of_an_accepted_path_drops_the_rest_of_the_path(
    complete: Make, stream: tuple[int, ...]
) -> None:
    at = next(i for i, token in enumerate(stream) if token in EOS)
    tokens, finish, steps = complete(levels=63, max_tokens=60)
    assert tokens == stream[: at + 1]
    assert finish is FinishReason.STOP
    assert len(steps) == 2
    assert steps[1].outcome.accepted == tuple(range(1, at + 1))
    assert steps[1].outcome.verified > at + 1


def test_an_end_as_the_very_first_token_ends_the_session_when_it_opens(
    complete: Make, stream: tuple[int, ...]
) -> None:
    tokens, finish, steps = complete(max_tokens=60, stop_token_ids=(stream[0],))
    assert tokens == stream[:1]
    assert finish is FinishReason.STOP
    assert len(steps) == 1


@pytest.mark.parametrize("levels", [0, 3])
def test_an_end_as_the_last_allowed_token_is_a_stop(
    levels: int, complete: Make, stream: tuple[int, ...]
) -> None:
    at = next(i for i, token in enumerate(stream) if token in EOS)
    assert complete(levels, max_tokens=at + 1)[1] is FinishReason.STOP
    assert complete(levels, max_tokens=at)[1] is FinishReason.LENGTH


@pytest.mark.parametrize("levels", [0, 8])
def test_each_of_several_end_tokens_ends_a_text(levels: int, complete: Make, stream: tuple[int, ...]) -> None:
    others = tuple(dict.fromkeys(token for token in stream[8:] if token not in {*EOS, *stream[:8]}))[:5]
    assert len(others) > 3
    for at, end in ((stream.index(end), end) for end in others):
        tokens = complete(levels, max_tokens=80, ignore_eos=True, stop_token_ids=(*others[at:], end))[0]
        assert tokens == stream[: at + 1]
    for end in EOS & set(stream):
        bans = dict.fromkeys(EOS - {end}, float("-inf"))
        tokens, finish, _ = complete(levels, max_tokens=80, logit_bias=bans)
        assert set(tokens[:-1]).isdisjoint(EOS)
        assert (tokens[-1] in EOS) == (finish is FinishReason.STOP)


@pytest.mark.parametrize("levels", [0, 8])
def test_ignoring_end_of_sequence_goes_on_behind_it_but_not_behind_stop_tokens(
    levels: int, complete: Make, stream: tuple[int, ...]
) -> None:
    assert complete(levels, max_tokens=60, ignore_eos=True)[0] == stream[:60]
    at = next(i for i in range(40, 60) if stream[i] not in stream[:i])
    tokens, finish, _ = complete(levels, max_tokens=80, ignore_eos=True, stop_token_ids=(stream[at],))
    assert tokens == stream[: at + 1]
    assert finish is FinishReason.STOP
    assert EOS & set(tokens)


@pytest.mark.parametrize("levels", [0, 8])
@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_no_text_ends_before_its_minimum(levels: int, min_tokens: int, complete: Make) -> None:
    bias = dict.fromkeys(EOS, 9.0)
    tokens, finish, _ = complete(levels, max_tokens=30, min_tokens=min_tokens, logit_bias=bias)
    assert EOS.isdisjoint(tokens[:min_tokens])
    assert len(tokens) > min_tokens
    assert finish is FinishReason.STOP


def test_a_drafted_end_that_the_target_rejects_ends_nothing(target: Make, stream: tuple[int, ...]) -> None:
    verifier = Verifier(target("llama"), num_pages=20)
    session = Session("a", PROMPT, SamplingParams(max_tokens=60), SEED)
    assert EOS.isdisjoint(stream[:4])
    assert verifier.open(session).outcome.tokens == stream[:1]
    beside = DraftTree((stream[0], 2, 7, stream[1], 11), (-1, 0, 0, 0, 3), (1.0, 0.9, 0.5, 0.4, 0.9))
    outcome = verifier.verify({"a": beside})["a"].outcome
    assert outcome.tokens == stream[1:3]
    assert outcome.accepted == (3,)
    assert outcome.finish is None
    alone = verifier.verify({"a": DraftTree.chain((stream[2], 2))})["a"].outcome
    assert alone.tokens == stream[3:4]
    assert alone.accepted == ()
    assert alone.finish is None
    verifier.check()


@pytest.mark.parametrize("levels", [0, 1, 6, 63])
@pytest.mark.parametrize("prompt_length", [1, 10, 22, 23])
def test_a_text_ends_at_the_context_length_and_no_position_lies_beyond(
    levels: int, prompt_length: int, plain: Make, watched: Make, run: Make
) -> None:
    short = {"max_position_embeddings": 24}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    session = Session("a", tuple(range(20, 20 + prompt_length)), params, 1)
    stream = plain("llama", **short).stream(session, 100)
    target = watched("llama", **short)
    drafter = Chains((*session.prompt, *stream), levels) if levels else None
    decoded = run(target, [session], drafter)
    assert decoded["a"] == stream[: 24 - prompt_length]
    assert decoded.finish("a") is FinishReason.LENGTH
    assert max(int(batch.positions.max()) for batch in target.batches) < 24


def test_sessions_of_one_batch_end_each_on_its_own(
    plain: Make, target: Make, stream: tuple[int, ...]
) -> None:
    base = Session("0", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), SEED)
    sessions = [replace(base, id=str(n), params=replace(base.params, max_tokens=n)) for n in range(12)]
    verifier, drafter = Verifier(target("llama"), num_pages=100), Chains((*PROMPT, *stream), 3)
    texts: dict[str, tuple[int, ...]] = {}
    for step in decode(verifier, drafter, sessions):
        texts[step.session] = texts.get(step.session, ()) + step.outcome.tokens
    assert texts == {s.id: stream[: s.params.max_tokens] for s in sessions}
