"""The verify service's thread: sessions of several streams, what they are told, and what outlives what."""

import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.attention import Batch
from services.engine.target import Target
from services.engine.transfer import from_block
from services.types.configuration import VerifyLimits
from services.types.errors import ErrorCode, WealdError
from services.types.messages import (
    Close,
    Failure,
    FeatureBlock,
    Features,
    Load,
    Open,
    Proposal,
    Proposals,
    Replies,
    Reply,
    Request,
    Response,
)
from services.types.outcome import Outcome
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.verify.service import VerifyService
from services.verify.verifier import Verifier

Make = Callable[..., Any]

MARK = b"the target's"
TOLERANCE = 1e-6
"""The norms of transformers' models round to float32; the same rows in another step can differ by that."""


class Far:
    """The far end of a stream: what it is told waits for the test to read it."""

    def __init__(self, service: VerifyService) -> None:
        self.congested = False
        self.blocks: dict[str, list[FeatureBlock]] = {}
        self._service = service
        self._said: queue.SimpleQueue[Response] = queue.SimpleQueue()

    def post(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self._said.put(response)

    def say(self, request: Request | None) -> None:
        self._service.submit(self, request)

    def reply(self) -> Reply:
        """The next reply, of a session that is alone on this stream."""
        while True:
            match said := self._said.get(timeout=60):
                case Features(id, _, block):
                    self.blocks.setdefault(id, []).append(block)
                case Replies((reply,)):
                    if reply.features:
                        self.blocks.setdefault(reply.session, []).append(reply.features)
                    return reply
                case _:
                    raise AssertionError(said)

    def failure(self) -> Failure:
        """The next failure; what else was said before it is read over."""
        while not isinstance(said := self._said.get(timeout=60), Failure):
            pass
        return said

    def silent(self) -> bool:
        return self._said.empty()

    def rest(self, output: Sequence[int] = ()) -> tuple[int, ...]:
        """Output so far, and what follows without trees until the finish."""
        tokens = [*output]
        while True:
            reply = self.reply()
            tokens += reply.outcome.tokens
            if reply.outcome.finish:
                return tuple(tokens)

    def features(self, id: str) -> Tensor:
        """All features of a session so far, which came in order and without a gap."""
        rows = []
        for block in self.blocks[id]:
            assert block.start == self.blocks[id][0].start + sum(map(len, rows))
            rows.append(from_block(block, torch.float64, torch.device("cpu")))
        return torch.cat(rows)


@contextmanager
def serve(target: Target, ended: Callable[[], None] = lambda: None, **limits: Any) -> Iterator[VerifyService]:
    """A running service with 200 pages of 4 slots; at the end nothing is left in it."""
    verifier = Verifier(target, num_pages=200, page_size=4)
    service = VerifyService(verifier, VerifyLimits(**limits), MARK)
    service.start(ended)
    try:
        yield service
        if service.failed is None:
            wait_for(lambda: service.load() == Load(0, 0, 200))
            verifier.check()
    finally:
        service.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def session(id: str, prompt: int = 6, max_tokens: int = 20, **params: Any) -> Session:
    rng = random.Random(id)
    chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return Session(id, tuple(rng.randrange(61) for _ in range(prompt)), chosen, rng.getrandbits(64))


def opening(
    session: Session, epoch: int = 1, speculative: bool = False, features_from: int = 0, mark: bytes = MARK
) -> Open:
    return Open(session, epoch, mark, speculative, features_from)


def answer(session: Session, reply: Reply, tree: DraftTree) -> Proposals:
    """The tree that a reply wants."""
    root = reply.position + len(reply.outcome.tokens) - 1
    return Proposals((Proposal(session.id, reply.epoch, reply.round, root, tree),))


def test_trees_are_verified_and_named_by_their_own_nodes_while_features_follow(
    target: Make, plain: Make, hidden: Make
) -> None:
    rng, s = random.Random(4), session("a", prompt=37, max_tokens=60)
    text = plain("llama").text(s)
    accepted = 0
    with serve(target("llama"), max_num_batched_tokens=16, max_num_seqs=1) as service:
        far = Far(service)
        far.say(opening(s, speculative=True, features_from=5))
        tree, output = DraftTree.root(0), list[int]()
        while True:
            reply = far.reply()
            outcome = reply.outcome
            assert reply.position == 37 + len(output)
            assert reply.outcome.verified == reply.nodes.bit_count() <= 16
            assert all(reply.nodes >> node & 1 for node in (0, *outcome.accepted))
            path = tuple(tree.tokens[node] for node in outcome.accepted)
            assert outcome.tokens[: len(path)] == path
            assert reply.turnaround_ns > 0 or reply.nodes == 1
            accepted += len(path)
            output += outcome.tokens
            if outcome.finish:
                break
            known = 36 + len(output)
            if reply.wanted:
                features = far.features("a")
                assert far.blocks["a"][0].start == 5
                assert len(features) == known - 5
                tree = hidden(output[-1], text[len(output) : len(output) + 4], 61, 30, rng)[0]
                far.say(answer(s, reply, tree))
            else:
                tree = DraftTree.root(output[-1])
        assert tuple(output) == text
        assert len(far.blocks["a"]) > 3
        expected = plain("llama").run((*s.prompt, *text))[0][5 : 5 + len(features)]
        torch.testing.assert_close(features, expected, rtol=0, atol=TOLERANCE)
        counters = service.counters()
        assert counters["chunked_prefills"] == 2
        assert counters["trees_verified"] > 0
        assert counters["tokens_prefilled"] == 37
        assert counters["tokens_forwarded"] > 37 + counters["trees_verified"]
    assert accepted > 10


def test_a_session_without_speculation_gets_no_features_and_is_not_held(target: Make, plain: Make) -> None:
    s = session("a")
    with serve(target("llama")) as service:
        far = Far(service)
        far.say(opening(s))
        assert far.rest() == plain("llama").text(s)
        assert far.blocks == {}
        assert "trees_verified" not in service.counters()


def test_a_session_of_no_tokens_is_over_at_once(target: Make) -> None:
    s = session("a", max_tokens=0)
    with serve(target("llama")) as service:
        far = Far(service)
        far.say(opening(s))
        reply = far.reply()
        assert reply.outcome == Outcome((), (), 0, FinishReason.LENGTH)
        assert (reply.position, reply.nodes, reply.wanted) == (6, 0, False)


def test_a_session_goes_on_behind_tokens_that_were_delivered_elsewhere(target: Make, plain: Make) -> None:
    s = session("a", frequency_penalty=0.7)
    text = plain("llama").text(s)
    with serve(target("llama")) as service:
        far = Far(service)
        for count in (0, 1, 13, 19):
            far.say(opening(Session("a", s.prompt, s.params, s.seed, text[:count])))
            first = far.reply()
            assert first.position == 6 + count
            output = (*text[:count], *first.outcome.tokens)
            assert (output if first.outcome.finish else far.rest(output)) == text


def test_a_higher_epoch_takes_a_session_over_and_the_one_before_is_told(target: Make, plain: Make) -> None:
    s = session("a")
    text = plain("llama").text(s)
    with serve(target("llama")) as service:
        old, new = Far(service), Far(service)
        old.say(opening(s, epoch=3, speculative=True))
        first = old.reply()
        for late in (2, 3):
            new.say(opening(s, epoch=late))
            refused = new.failure()
            assert (refused.session, refused.epoch) == ("a", late)
            assert refused.error.code is ErrorCode.STALE_EPOCH
        new.say(opening(Session("a", s.prompt, s.params, s.seed, text[:1]), epoch=4))
        told = old.failure()
        assert (told.epoch, told.error.code) == (3, ErrorCode.STALE_EPOCH)
        old.say(answer(s, first, DraftTree.root(text[0])))
        assert old.failure().error.code is ErrorCode.STALE_EPOCH
        old.say(Close("a", 3))
        assert new.rest(text[:1]) == text


def test_a_tree_for_a_session_or_an_epoch_that_is_not_here_is_answered_alone(
    target: Make, plain: Make
) -> None:
    s = session("a")
    with serve(target("llama")) as service:
        far, other = Far(service), Far(service)
        far.say(opening(s, epoch=2))
        for id, epoch in (("stranger", 1), ("a", 7)):
            other.say(Proposals((Proposal(id, epoch, 0, 6, DraftTree.root(1)),)))
            refused = other.failure()
            assert (refused.session, refused.epoch) == (id, epoch)
            assert refused.error.code is ErrorCode.UNKNOWN_SESSION
        assert far.rest() == plain("llama").text(s)


def test_a_broken_stream_parks_its_sessions_for_another_to_take_over_or_until_they_expire(
    target: Make, plain: Make
) -> None:
    lost, taken = session("lost", max_tokens=200), session("taken")
    text = plain("llama").text(taken)
    with serve(target("llama"), expiry_s=0.2) as service:
        far, new = Far(service), Far(service)
        far.congested = True
        for s in (lost, taken):
            far.say(opening(s))
        wait_for(lambda: service.load().running == 2)
        far.say(None)
        new.say(opening(taken, epoch=2))
        assert new.rest() == text
        wait_for(lambda: service.counters().get("expired_sessions") == 1)
        assert far.silent()


def test_sessions_that_wait_when_their_stream_breaks_lose_their_places(target: Make) -> None:
    with serve(target("llama"), max_num_seqs=1, expiry_s=0.2) as service:
        far = Far(service)
        far.congested = True
        for id in "abc":
            far.say(opening(session(id)))
        wait_for(lambda: service.load().waiting == 2)
        far.say(None)
        wait_for(lambda: service.load().waiting == 0)


class Failing(Target):
    """A target whose next step fails when it is told how."""

    error: Exception | None = None

    def forward(self, tokens: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        if self.error:
            error, self.error = self.error, None
            raise error
        return super().forward(tokens, batch, logit_rows)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("out of memory"), ErrorCode.INTERNAL),
        (WealdError(ErrorCode.RESOURCE_EXHAUSTED, "no pages"), ErrorCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_step_that_fails_ends_its_own_sessions_and_no_others(
    error: Exception, code: ErrorCode, model: Make, plain: Make
) -> None:
    target = Failing(model("llama"))
    good, bad = session("good"), session("bad")
    with serve(target) as service:
        far, other = Far(service), Far(service)
        far.congested = True
        far.say(opening(good))
        wait_for(lambda: service.load().running == 1)
        target.error = error
        other.say(opening(bad))
        told = other.failure()
        assert (told.session, told.epoch, told.error.code) == ("bad", 1, code)
        far.congested = False
        assert far.rest() == plain("llama").text(good)
        other.say(opening(bad))
        assert other.rest() == plain("llama").text(bad)


def test_without_its_ranks_the_service_ends_and_every_session_is_told(model: Make) -> None:
    target = Failing(model("llama"))
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with serve(target, lambda: ended.put(True)) as service:
        far, other = Far(service), Far(service)
        far.congested = True
        far.say(opening(session("a")))
        wait_for(lambda: service.load().running == 1)
        target.error = WealdError(ErrorCode.UNAVAILABLE, "a rank is gone")
        other.say(opening(session("b")))
        assert ended.get(timeout=60)
        assert {far.failure().error.message, other.failure().error.message} == {"a rank is gone"}
        assert service.failed
        assert service.failed.code is ErrorCode.UNAVAILABLE


def test_draining_lets_sessions_finish_refuses_new_ones_and_waits_for_no_parked_one(
    target: Make, plain: Make
) -> None:
    s = session("a", max_tokens=100)
    with serve(target("llama")) as service:
        far, gone, late = Far(service), Far(service), Far(service)
        gone.congested = True
        gone.say(opening(session("parked")))
        wait_for(lambda: service.load().running == 1)
        gone.say(None)
        far.say(opening(s))
        first = far.reply().outcome.tokens
        far.congested = True
        assert service.drain(0.1) is False
        late.say(opening(session("late")))
        assert late.failure().error.code is ErrorCode.UNAVAILABLE
        far.congested = False
        assert service.drain(60) is True
        assert service.load().running == 1
        assert far.rest(first) == plain("llama").text(s)
        late.say(Close("parked", 1))


def test_pages_that_cannot_hold_one_session_are_refused_with_what_to_change(target: Make) -> None:
    verifier = Verifier(target("llama"), num_pages=63, page_size=4)
    with pytest.raises(WealdError, match="holds 252 tokens and one session can have 256; give") as refused:
        VerifyService(verifier, VerifyLimits(), MARK)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert VerifyService(Verifier(target("llama"), num_pages=64, page_size=4), VerifyLimits(), MARK)


def test_a_session_for_another_target_is_refused(target: Make) -> None:
    with serve(target("llama")) as service:
        far = Far(service)
        far.say(opening(session("a"), mark=b"another one's"))
        error = far.failure().error
        assert error.code is ErrorCode.INCOMPATIBLE_CHECKPOINT
        assert "start both services with the same --model" in error.message
