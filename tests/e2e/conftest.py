"""Tiny checkpoints and the texts they give, callers of a draft service, and a drafter played by hand."""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.bench.replicas import Replica, replica
from services.draft.serving import load as load_drafter
from services.draft.serving import run as run_drafter
from services.local.models import Models
from services.local.models import load as load_models
from services.sessions.memory import MemoryStore
from services.types.configuration import DraftConfig, Place
from services.types.messages import (
    Call,
    DraftStatus,
    Failure,
    FeatureBlock,
    Features,
    Finished,
    Load,
    Open,
    Proposal,
    Proposals,
    Replies,
    Reply,
    Request,
    Round,
    Started,
    VerifyStatus,
)
from services.types.outcome import Outcome
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

PATIENCE_S = 60.0
"""For what comes within milliseconds unless something is broken."""
PROCESSORS: tuple[dict[str, Any], ...] = (
    {},
    {"logit_bias": {3: 2.0, 9: -math.inf}},
    {"repetition_penalty": 1.6},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"frequency_penalty": -0.6, "top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.1, "min_tokens": 1},
)


@dataclass(frozen=True)
class Tiny:
    """A target and a head on disk, and what the target says, by plain steps in this process."""

    target: Path
    head: Path
    models: Models
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def text(self, session: Session) -> tuple[int, ...]:
        """The output of a session."""
        return tuple(token for outcome in self._outcomes(session) for token in outcome.tokens)

    def finish(self, session: Session) -> FinishReason | None:
        """Why it ends there."""
        return self._outcomes(session)[-1].finish

    def _outcomes(self, session: Session) -> list[Outcome]:
        key = repr((session.prompt, session.params, session.seed))
        if key not in self.outcomes:
            steps = self.models.decode(replace(session, id="plain"), None)
            self.outcomes[key] = [step.outcome for step in steps]
        return self.outcomes[key]

    @property
    def verify(self) -> tuple[object, ...]:
        """Arguments of a verify replica at a free port."""
        return "verify", "--model", self.target, "--dtype", "float64", "--port", 0

    def draft(self, *verifiers: str) -> tuple[object, ...]:
        """Arguments of a draft replica at a free port."""
        named = ("--model", self.target, "--speculative-model", self.head, "--dtype", "float64", "--port", 0)
        named += ("--speculative-budget", 60, "--speculative-num-steps", 6)
        return "draft", *named, *(word for address in verifiers for word in ("--verify", address))

    def gateway(self, *drafters: str) -> tuple[object, ...]:
        """Arguments of a gateway at a free port."""
        named = ("--model", self.target, "--served-model-name", "tiny", "--port", 0)
        return "gateway", *named, *(word for address in drafters for word in ("--endpoint", address))


@pytest.fixture(scope="session")
def tiny(checkpoints: Any) -> Tiny:
    """A target of 15 tokens and an undecided head, in float64."""
    target, head = checkpoints.target, checkpoints.head
    models = load_models(str(target), str(head), speculative=True, device="cpu", dtype="float64")
    return Tiny(target, head, models)


@dataclass
class Answer:
    """What a caller of a draft service has heard."""

    started: Started | None = None
    rounds: list[Round] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output."""
        return tuple(token for round in self.rounds for token in round.tokens)

    def is_whole(self, session: Session, tiny: Tiny) -> bool:
        """Whether it is the text of this session, round behind round, from its first event to its last."""
        assert self.started
        assert self.finished
        assert (self.started.session, self.started.seed) == (session.id, session.seed)
        at = len(session.prompt)
        for round in self.rounds:
            assert round.position == at
            assert (round.finish is None) == (round is not self.rounds[-1])
            at += len(round.tokens)
        assert self.finished.finish_reason is self.rounds[-1].finish is tiny.finish(session)
        assert (self.finished.prompt_tokens, self.finished.output_tokens) == (
            len(session.prompt),
            len(self.tokens),
        )
        return self.tokens == tiny.text(session)


async def listen(client: DraftClient, call: Call, leave_after: int | None = None) -> Answer:
    """What a caller hears who stays to the end, or leaves after so many events."""
    answer, heard = Answer(), 0
    async with aclosing(client.generate(call)) as events:
        async for event in events:
            match event:
                case Started():
                    answer.started = event
                case Round():
                    answer.rounds.append(event)
                case Finished():
                    answer.finished = event
            heard += 1
            if heard == leave_after:
                break
    return answer


def call_for(session: Session, **options: Any) -> Call:
    """The call that generates a session."""
    params = replace(session.params, seed=session.seed)
    return Call(session.id, session.prompt, session.output, params, **options)


def mixed_sessions(
    name: str, count: int, prompts: Sequence[int], tokens: tuple[int, int], vocab_size: int = 15
) -> list[Session]:
    """Sessions of all temperatures and processors; of every two, one ends at an end token if it comes."""
    rng = random.Random(name)
    sessions = []
    for i in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(*tokens),
            temperature=(0.0, 0.7, 1.3)[i % 3],
            ignore_eos=i % 2 == 0,
            **rng.choice(PROCESSORS),
        )
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.choice(prompts)))
        sessions.append(Session(f"{name} {i}", prompt, params, rng.getrandbits(64)))
    return sessions


@dataclass
class Services:
    """A verify and a draft replica, as their callers reach them."""

    verifier: VerifyClient
    drafter: DraftClient

    async def linked(self) -> None:
        """Wait until the drafter has found all its verify replicas."""
        async with asyncio.timeout(PATIENCE_S):
            while not all((await self.drafter.status(PATIENCE_S)).verifiers.values()):
                await asyncio.sleep(0.02)

    async def idle(self) -> tuple[VerifyStatus, DraftStatus]:
        """Wait until neither holds a session, a page or a place in a queue; what both say then."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                verifies, drafts = await asyncio.gather(
                    self.verifier.status(PATIENCE_S), self.drafter.status(PATIENCE_S)
                )
                vacant = verifies.load == Load(0, 0, verifies.num_pages)
                if vacant and (drafts.running, drafts.free_pages) == (0, drafts.num_pages):
                    return verifies, drafts
                await asyncio.sleep(0.02)

    async def counters(self) -> dict[str, int]:
        """What the verify replica has counted so far."""
        return dict((await self.verifier.status(PATIENCE_S)).counters)


@asynccontextmanager
async def connected(verifier: str, drafter: str) -> AsyncIterator[Services]:
    """Channels to replicas that are ready for calls."""
    async with connect(verifier) as to_verifier, connect(drafter) as to_drafter:
        services = Services(VerifyClient(to_verifier), DraftClient(to_drafter))
        await services.linked()
        yield services


async def status_of(address: str) -> VerifyStatus:
    """What a verify replica says of itself."""
    async with connect(address) as channel:
        return await VerifyClient(channel).status(PATIENCE_S)


async def wait_until_vacant(address: str) -> VerifyStatus:
    """Wait until a verify replica holds no session and no page; what it says then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            said = await status_of(address)
            if said.load == Load(0, 0, said.num_pages):
                return said
            await asyncio.sleep(0.05)


class Hand:
    """A drafter played by hand, on one stream to a verify replica."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request | None] = asyncio.Queue()
        self.blocks: dict[str, list[FeatureBlock]] = defaultdict(list)
        self.replies: dict[str, list[Reply]] = defaultdict(list)
        self._said: dict[str, asyncio.Queue[Reply | Failure]] = defaultdict(asyncio.Queue)

    def say(self, *requests: Request) -> None:
        """Send, in this order."""
        for request in requests:
            self.requests.put_nowait(request)

    async def hear(self, id: str) -> Reply:
        """The next reply to a session. Raises the session's error when there is one instead."""
        async with asyncio.timeout(PATIENCE_S):
            said = await self._said[id].get()
        if isinstance(said, Failure):
            raise said.error
        return said

    async def play(
        self,
        opened: Open,
        text: Sequence[int],
        tree: Callable[[int, Sequence[int]], DraftTree] | None = None,
    ) -> tuple[int, ...]:
        """Open a session and see it to its end; `tree` makes what is wanted of a root and what follows it."""
        session, output = opened.session, list(opened.session.output)
        self.say(opened)
        while True:
            reply = await self.hear(session.id)
            assert reply.position == len(session.prompt) + len(output)
            output += reply.outcome.tokens
            if reply.outcome.finish:
                return tuple(output)
            if reply.wanted and tree:
                root = len(session.prompt) + len(output) - 1
                drafted = tree(output[-1], text[len(output) : len(output) + 6])
                self.say(Proposals((Proposal(session.id, opened.epoch, reply.round, root, drafted),)))

    async def read(self, client: VerifyClient) -> None:
        """Sort what the replica says by session, until the stream ends."""

        async def outgoing() -> AsyncIterator[Request]:
            while request := await self.requests.get():
                yield request

        async with aclosing(client.verify(outgoing())) as responses:
            async for response in responses:
                match response:
                    case Features(session, _, block):
                        self.blocks[session].append(block)
                    case Replies(replies):
                        for reply in replies:
                            if reply.features:
                                self.blocks[reply.session].append(reply.features)
                            self.replies[reply.session].append(reply)
                            self._said[reply.session].put_nowait(reply)
                    case Failure(session):
                        self._said[session].put_nowait(response)


@asynccontextmanager
async def play_by_hand(address: str) -> AsyncIterator[Hand]:
    """A stream to a verify replica; leaving breaks it."""
    async with connect(address) as channel:
        hand = Hand()
        reading = asyncio.create_task(hand.read(VerifyClient(channel)))
        try:
            yield hand
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.fixture(scope="session")
def call() -> Callable[..., Call]:
    """`call(session, speculative=…)` is the call that generates a session."""
    return call_for


@pytest.fixture(scope="session")
def hear() -> Callable[..., Any]:
    """`await hear(client, call, leave_after)` is the `Answer`."""
    return listen


@pytest.fixture(scope="session")
def mixed() -> Callable[..., list[Session]]:
    """`mixed(name, count, prompts, tokens)` are sessions with prompts and outputs of these lengths."""
    return mixed_sessions


@pytest.fixture(scope="session")
def reach() -> Callable[..., AbstractAsyncContextManager[Services]]:
    """`async with reach(verifier, drafter) as services`, of two addresses."""
    return connected


@pytest.fixture(scope="session")
def by_hand() -> Callable[[str], AbstractAsyncContextManager[Hand]]:
    """`async with by_hand(address) as hand`, of a verify replica's address."""
    return play_by_hand


@pytest.fixture(scope="session")
def status() -> Callable[[str], Awaitable[VerifyStatus]]:
    """`await status(address)` of a verify replica."""
    return status_of


@pytest.fixture(scope="session")
def vacant() -> Callable[[str], Awaitable[VerifyStatus]]:
    """`await vacant(address)` is its status once it holds nothing."""
    return wait_until_vacant


@pytest.fixture(scope="session")
def drafting(tiny: Tiny) -> Callable[..., AbstractAsyncContextManager[str]]:
    """`async with drafting(verifier) as address`: a draft replica in this process, drained at the end."""

    @asynccontextmanager
    async def drafting(*verifiers: str) -> AsyncIterator[str]:
        service, status = load_drafter(
            str(tiny.target),
            str(tiny.head),
            torch.float64,
            torch.device("cpu"),
            DraftConfig(),
            memory=2**23,
            max_num_seqs=256,
        )
        stopping, port = asyncio.Event(), asyncio.get_running_loop().create_future()
        running = asyncio.create_task(
            run_drafter(
                service,
                status,
                Place(drain_s=PATIENCE_S),
                MemoryStore(),
                verifiers,
                None,
                port.set_result,
                stopping,
            )
        )
        await asyncio.wait({running, port}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if port.done():
                yield f"127.0.0.1:{port.result()}"
        finally:
            stopping.set()
            await running

    return drafting


@dataclass(frozen=True)
class Served:
    """A gateway, a draft and a verify replica behind it, as processes."""

    gateway: Replica
    drafter: Replica
    verifier: Replica

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://{self.gateway.address}"


@pytest.fixture(scope="session")
def served(tiny: Tiny) -> Iterator[Served]:
    """The tiny model over HTTP, as `tiny`."""
    with (
        replica(*tiny.verify, "--kv-cache-memory", "16MiB", threads=1) as verifier,
        replica(*tiny.draft(verifier.address), "--kv-cache-memory", "8MiB", threads=1) as drafter,
        replica(*tiny.gateway(drafter.address)) as gateway,
    ):
        yield Served(gateway, drafter, verifier)
