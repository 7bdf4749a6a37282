"""What the verifier refuses: each with a clear error, its pages in order, its neighbours unharmed."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.attention import Batch
from services.engine.target import Target
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.verify.verifier import Verifier, pages_for

Make = Callable[..., Any]

ENDLESS = SamplingParams(max_tokens=20, ignore_eos=True)
NEIGHBOUR = Session("neighbour", (3, 1, 4, 1, 5), ENDLESS, 9)


class Neighbour:
    """A session that is open while others fail."""

    def __init__(self, verifier: Verifier, text: tuple[int, ...]) -> None:
        self.verifier, self.text = verifier, text
        self.output = [*verifier.open(NEIGHBOUR).outcome.tokens]

    @property
    def tree(self) -> DraftTree:
        at = len(self.output)
        return DraftTree.chain((self.output[-1], *self.text[at : at + 2]))

    def step(self) -> FinishReason | None:
        outcome = self.verifier.verify({"neighbour": self.tree})["neighbour"].outcome
        self.output += outcome.tokens
        return outcome.finish

    def is_unharmed(self) -> bool:
        """Its text goes on to its end as if nothing had happened, and the pages are in order."""
        self.verifier.check()
        while self.step() is None:
            self.verifier.check()
        self.verifier.check()
        return tuple(self.output) == self.text


@pytest.fixture
def verifier(target: Make) -> Verifier:
    """20 pages of 4 slots: 80 positions."""
    return Verifier(target("llama"), num_pages=20, page_size=4)


@pytest.fixture
def neighbour(verifier: Verifier, plain: Make) -> Neighbour:
    neighbour = Neighbour(verifier, plain("llama").text(NEIGHBOUR))
    neighbour.step()
    return neighbour


def bad(prompt: tuple[int, ...], **params: Any) -> Session:
    return Session("bad", prompt, SamplingParams(**params), 0)


@pytest.mark.parametrize(
    ("session", "code", "message"),
    [
        (bad(()), ErrorCode.INVALID_ARGUMENT, "the prompt is empty; give at least one token"),
        (bad((1, 61)), ErrorCode.INVALID_ARGUMENT, "token 61 is not in the target's vocabulary of 61"),
        (bad((-1, 1)), ErrorCode.INVALID_ARGUMENT, "token -1 is not in the target's vocabulary of 61"),
        (bad((1,), logit_bias={99: 1.0}), ErrorCode.INVALID_ARGUMENT, "token 99 is not in"),
        (bad((1,), stop_token_ids=(75,)), ErrorCode.INVALID_ARGUMENT, "token 75 is not in"),
        (
            bad((1,) * 256),
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "the prompt has 256 tokens and the target's context is 256; shorten the prompt",
        ),
        (bad((1,) * 78), ErrorCode.RESOURCE_EXHAUSTED, "20 KV pages of 4 tokens are needed and 1[0-9] are"),
    ],
)
def test_a_session_that_cannot_be_opened_says_why_and_owns_nothing(
    session: Session, code: ErrorCode, message: str, verifier: Verifier, neighbour: Neighbour, idle: Make
) -> None:
    with pytest.raises(WealdError, match=message) as refused:
        verifier.open(session)
    assert refused.value.code is code
    with pytest.raises(WealdError, match="session bad is not open; open it first"):
        verifier.verify({"bad": DraftTree.root(1)})
    assert neighbour.is_unharmed()
    idle(verifier)


def test_an_id_that_is_open_cannot_be_opened_again(verifier: Verifier, neighbour: Neighbour) -> None:
    with pytest.raises(WealdError, match="session neighbour is already open") as refused:
        verifier.open(Session("neighbour", (1, 2), ENDLESS, 0))
    assert refused.value.code is ErrorCode.ALREADY_EXISTS
    assert neighbour.is_unharmed()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree.chain((60, 1, 2)), "the tree's root is token 60, the pending token of session other is"),
        (DraftTree.chain((-1, 61)), "token 61 is not in the target's vocabulary of 61"),
        (DraftTree.chain((-1, 3, -5)), "token -5 is not in the target's vocabulary of 61"),
    ],
)
def test_a_tree_that_cannot_be_verified_stops_its_round_before_anything_is_computed(
    tree: DraftTree, message: str, watched: Make, plain: Make
) -> None:
    target = watched("llama")
    verifier = Verifier(target, num_pages=40, page_size=4)
    neighbour = Neighbour(verifier, plain("llama").text(NEIGHBOUR))
    params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={60: -math.inf})
    other = Session("other", (8, 9), params, 4)
    (root,) = verifier.open(other).outcome.tokens
    if tree.tokens[0] == -1:
        tree = DraftTree((root, *tree.tokens[1:]), tree.parents, tree.confidences)
    steps = len(target.batches)
    for trees in ({"neighbour": neighbour.tree, "other": tree}, {"other": tree, "neighbour": neighbour.tree}):
        with pytest.raises(WealdError, match=message) as refused:
            verifier.verify(trees)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert len(target.batches) == steps
    assert neighbour.is_unharmed()
    output = [root]
    while len(output) < 20:
        output += verifier.verify({"other": DraftTree.root(output[-1])})["other"].outcome.tokens
    assert tuple(output) == plain("llama").text(other)


def test_a_session_that_is_not_open_stops_its_round_before_anything_is_computed(
    verifier: Verifier, neighbour: Neighbour
) -> None:
    with pytest.raises(WealdError, match="session stranger is not open") as refused:
        verifier.verify({"neighbour": neighbour.tree, "stranger": DraftTree.root(1)})
    assert refused.value.code is ErrorCode.UNKNOWN_SESSION
    assert neighbour.is_unharmed()


def test_a_session_is_unknown_after_its_finish_and_after_its_close(verifier: Verifier, idle: Make) -> None:
    opened = verifier.open(Session("a", (1, 2), SamplingParams(max_tokens=2, ignore_eos=True), 0))
    (root,) = opened.outcome.tokens
    (token,) = verifier.verify({"a": DraftTree.root(root)})["a"].outcome.tokens
    with pytest.raises(WealdError, match="session a is not open"):
        verifier.verify({"a": DraftTree.root(token)})
    (root,) = verifier.open(Session("a", (1, 2), ENDLESS, 0)).outcome.tokens
    verifier.close("a")
    with pytest.raises(WealdError, match="session a is not open"):
        verifier.verify({"a": DraftTree.root(root)})
    verifier.close("a")
    idle(verifier)


def test_a_tree_without_room_is_refused_and_can_come_again_when_pages_are_free(
    verifier: Verifier, neighbour: Neighbour, plain: Make
) -> None:
    session = Session("large", tuple(range(40)), ENDLESS, 7)
    stream = plain("llama").stream(session, 20)
    (root,) = verifier.open(session).outcome.tokens
    too_large = DraftTree((root, *range(50)), (-1, *[0] * 50), (1.0, *[0.1] * 50))
    with pytest.raises(WealdError, match="KV pages of 4 tokens are needed and") as refused:
        verifier.verify({"neighbour": neighbour.tree, "large": too_large})
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert neighbour.is_unharmed()
    small_enough = DraftTree.chain(stream[:19])
    assert verifier.verify({"large": small_enough})["large"].outcome.tokens == stream[1:]


def test_the_integrity_check_catches_a_leaked_page_and_one_with_two_owners(
    verifier: Verifier, neighbour: Neighbour
) -> None:
    verifier.open(Session("other", (1, 2), ENDLESS, 0))
    mine, others = (verifier._sessions[id].pages for id in ("neighbour", "other"))
    page = mine.pop()
    with pytest.raises(WealdError, match=rf"KV pages leaked: \[{page}\]; miscounted: \[\]"):
        verifier.check()
    mine.append(others[0])
    with pytest.raises(WealdError, match=rf"leaked: \[{page}\]; miscounted: \[{others[0]}\]"):
        verifier.check()
    mine[-1] = page
    verifier.check()


class Failing(Target):
    """A target whose step fails when told to, as for want of memory."""

    fails = False

    def forward(self, tokens: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        """As the target does, if at all."""
        if self.fails:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(tokens, batch, logit_rows)


def test_a_step_that_fails_commits_nothing_and_an_open_that_fails_owns_nothing(
    model: Make, plain: Make, idle: Make
) -> None:
    target = Failing(model("llama"))
    verifier = Verifier(target, num_pages=20, page_size=4)
    neighbour = Neighbour(verifier, plain("llama").text(NEIGHBOUR))
    target.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        verifier.open(Session("bad", (1, 2), ENDLESS, 0))
    with pytest.raises(torch.OutOfMemoryError):
        neighbour.step()
    target.fails = False
    with pytest.raises(WealdError, match="session bad is not open"):
        verifier.verify({"bad": DraftTree.root(1)})
    assert neighbour.is_unharmed()
    idle(verifier)


def test_no_tokens_at_all_need_no_pages(target: Make, idle: Make) -> None:
    verifier = Verifier(target("llama"), num_pages=0)
    verified = verifier.open(Session("a", (1, 2, 3), SamplingParams(max_tokens=0), 0))
    assert verified.outcome.tokens == ()
    assert verified.outcome.finish is FinishReason.LENGTH
    assert len(verified.features) == 0
    idle(verifier)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17])
def test_the_pages_foreseen_for_a_session_hold_it_with_the_largest_trees(
    prompt_length: int, page_size: int, plain: Make, target: Make, idle: Make
) -> None:
    rng = random.Random(prompt_length)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    session = Session("a", tuple(rng.randrange(61) for _ in range(prompt_length)), params, 0)
    stream = plain("llama").stream(session, 20)
    pages = pages_for(prompt_length + 20, page_size)
    verifier = Verifier(target("llama"), num_pages=pages, page_size=page_size)
    output = [*verifier.open(session).outcome.tokens]
    while len(output) < 20:
        wide = DraftTree((output[-1], *range(61), 0, 1), (-1, *[0] * 61, 1, 1), (1.0, *[0.1] * 63))
        output += verifier.verify({"a": wide})["a"].outcome.tokens
    assert tuple(output) == stream
    idle(verifier)


def test_a_round_of_no_sessions_needs_no_step(watched: Make) -> None:
    target = watched("llama")
    before = len(target.batches)
    assert Verifier(target, num_pages=4).verify({}) == {}
    assert len(target.batches) == before
