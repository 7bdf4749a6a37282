"""The journal of a draft replica, on a store that fails in every way; seconds pass at once here."""

import asyncio
import itertools
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.sessions.journal import BACKLOG_TOKENS, EXCHANGE_TOKENS, GATHER_S, LAST_RETRY_S, Journal
from services.sessions.memory import MemoryStore
from services.sessions.store import Append, unknown
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason, Record, Session

MARK = b"mark"
SOON_S = 2 * GATHER_S
CALM_S = 10 * LAST_RETRY_S
SLOW_S = 0.2
"""Longer than some pauses between exchanges, shorter than others."""


class Skipping(selectors.DefaultSelector):
    """Where the event loop would wait, its time passes at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        assert ready or timeout is not None, "everything waits for something that never comes"
        if not ready:
            self.now_s += timeout
        return ready


def run(scenario: Coroutine[Any, Any, None]) -> None:
    def loop() -> asyncio.AbstractEventLoop:
        selector = Skipping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        return loop

    milliseconds = itertools.count(1_700_000_000_000)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=loop) as runner:
        # All of a test can pass in one millisecond; here no two leases are of the same.
        clock = SimpleNamespace(time_ns=lambda: next(milliseconds) * 1_000_000)
        patch.setattr("services.types.session.time", clock)
        runner.run(scenario)


@dataclass
class Vault:
    """What all processes reach; it can lose everything."""

    store: MemoryStore = field(default_factory=MemoryStore)

    def wipe(self) -> None:
        self.store = MemoryStore()

    async def output(self, id: str = "s") -> tuple[int, ...]:
        return (await self.store.load(id)).session.output


@dataclass
class Link:
    """The store as one process reaches it: `up`, `slow`, `lost`, or such that the answers are lost.

    `unheard` calls happen at once, `late` ones some time after the caller has given up.
    """

    vault: Vault
    state: str = "up"
    calls: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    """Sessions whose appends fail, one by one."""
    answer_s: list[float] = field(default_factory=list)
    """Seconds that the answers to the next leases take."""
    sizes: list[int] = field(default_factory=list)
    """Tokens in each append."""
    appending: bool = False

    async def create(self, record: Record) -> None:
        await self._call("create", record)

    async def load(self, id: str) -> Record:
        return await self._call("load", id)

    async def lease(self, id: str) -> Record:
        record = await self._call("lease", id)
        await asyncio.sleep(self.answer_s.pop(0) if self.answer_s else 0)
        return record

    async def append(self, appends: Sequence[Append]) -> list[int | WealdError]:
        self.sizes.append(sum(len(append.tokens) for append in appends))
        assert not self.appending, "one exchange at a time"
        self.appending = True
        try:
            results = await self._call("append", appends)
        finally:
            self.appending = False
        return [
            away() if append.session in self.refused else result
            for append, result in zip(appends, results, strict=True)
        ]

    async def _call(self, name: str, argument: Any) -> Any:
        self.calls[name] += 1
        if self.state == "slow":
            await asyncio.sleep(SLOW_S)
        elif self.state == "unheard":
            await self._happen(name, argument)
        elif self.state == "late" and name != "lease":
            # A real store gives a late lease the epoch of its call, this one that of the time it happens.
            asyncio.get_running_loop().call_later(
                SLOW_S, lambda: asyncio.ensure_future(self._happen(name, argument))
            )
        if self.state in ("lost", "unheard", "late"):
            raise away()
        return await getattr(self.vault.store, name)(argument)

    async def _happen(self, name: str, argument: Any) -> None:
        with suppress(WealdError):
            await getattr(self.vault.store, name)(argument)


def away() -> WealdError:
    return WealdError(ErrorCode.UNAVAILABLE, "the store is away")


@dataclass
class Process:
    """A draft replica's journal at work."""

    journal: Journal
    link: Link
    fenced: list[tuple[str, int]]


@asynccontextmanager
async def process(vault: Vault) -> AsyncIterator[Process]:
    link, fenced = Link(vault), list[tuple[str, int]]()
    journal = Journal(link, lambda id, epoch: fenced.append((id, epoch)))
    running = asyncio.create_task(journal.run())
    try:
        yield Process(journal, link, fenced)
    finally:
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def session(
    output: Sequence[int] = (),
    id: str = "s",
    prompt: tuple[int, ...] = (1, 2, 3),
    seed: int = 5,
    **params: Any,
) -> Session:
    return Session(id, prompt, SamplingParams(**params), seed, tuple(output))


def nameless(id: str = "s") -> Session:
    """What is begun where only the journal knows the session."""
    return session(id=id, prompt=(), seed=9)


async def forgotten(process: Process, id: str = "s") -> bool:
    """Whether the process knows nothing more of a session."""
    process.link.state = "lost"
    try:
        await process.journal.begin(nameless(id), MARK)
    except WealdError as error:
        return error.code is ErrorCode.UNAVAILABLE
    return False


def test_a_new_session_is_in_the_store_when_it_begins() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            record = await a.journal.begin(session([4, 5]), MARK)
            assert record == await vault.store.load("s")
            assert (record.session, record.fingerprint, record.finish) == (session([4, 5]), MARK, None)
            assert record.epoch > 0
            assert record.epoch % MOVES == 0
            assert a.journal.backlog == 0

    run(scenario())


def test_what_all_sessions_commit_meanwhile_is_written_in_one_exchange() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epochs = {id: (await a.journal.begin(session(id=id), MARK)).epoch for id in "abc"}
            for step in range(3):
                for id, epoch in epochs.items():
                    a.journal.write(id, epoch, (step, step + 10))
            assert a.journal.backlog == 18
            await asyncio.sleep(SOON_S)
            for id in "abc":
                assert await vault.output(id) == (0, 10, 1, 11, 2, 12)
            assert a.link.calls == {"create": 3, "append": 1}
            assert (a.journal.counters["journal_writes"], a.journal.counters["journal_tokens"]) == (1, 18)
            assert a.journal.backlog == 0
            a.journal.write("b", epochs["b"], (99,))
            await asyncio.sleep(SOON_S)
            assert (await vault.output("b"))[-1] == 99
            assert a.link.sizes == [18, 1]
            await asyncio.sleep(CALM_S)
            assert a.link.calls["append"] == 2

    run(scenario())


@pytest.mark.parametrize("delivered", [(), (7,), (7, 8, 9), (7, 8, 9, 10)])
def test_a_known_session_goes_on_from_the_longest_output_under_a_higher_epoch(
    delivered: tuple[int, ...],
) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            earlier = await a.journal.begin(session([7, 8]), MARK)
            a.journal.write("s", earlier.epoch, (9,))
            await asyncio.sleep(SOON_S)
            record = await b.journal.begin(session(delivered), MARK)
            longest = max((7, 8, 9), delivered, key=len)
            assert record.session == session(longest)
            assert record.epoch > earlier.epoch
            b.journal.write("s", record.epoch, (50, 51))
            await asyncio.sleep(SOON_S)
            assert await vault.output() == (*longest, 50, 51)

    run(scenario())


def test_the_seed_of_the_record_counts_where_the_request_names_none() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            await a.journal.begin(session(seed=5), MARK)
            assert (await b.journal.begin(session(seed=6), MARK)).session.seed == 5
            for same in (5, 5 + 2**64, 5 - 2**64):
                again = Session("s", (1, 2, 3), SamplingParams(seed=same), same)
                assert (await b.journal.begin(again, MARK)).session.seed == 5

    run(scenario())


NOT_THIS = [
    (session(prompt=(1, 2)), MARK, ErrorCode.INVALID_ARGUMENT, "id s is used for another request"),
    (session(temperature=0.5), MARK, ErrorCode.INVALID_ARGUMENT, "id s is used for another request"),
    (session(), b"other", ErrorCode.INCOMPATIBLE_CHECKPOINT, "is text of another target"),
    (
        Session("s", (1, 2, 3), SamplingParams(seed=6), 6),
        MARK,
        ErrorCode.INVALID_ARGUMENT,
        "with another prompt, seed or parameters",
    ),
    (session([7, 9]), MARK, ErrorCode.DIVERGED, "is not the text that the journal has of it"),
    (session([7, 9, 9, 9]), MARK, ErrorCode.DIVERGED, "is not the text that the journal has of it"),
    (
        replace(nameless(), output=(8,)),
        MARK,
        ErrorCode.DIVERGED,
        "is not the text that the journal has of it",
    ),
    (nameless(), b"other", ErrorCode.INCOMPATIBLE_CHECKPOINT, "is text of another target"),
]


@pytest.mark.parametrize(("request_", "mark", "code", "says"), NOT_THIS)
def test_what_is_not_this_session_is_refused_without_harm_to_it(
    request_: Session, mark: bytes, code: ErrorCode, says: str
) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            served = await a.journal.begin(session([7, 8]), MARK)
            with pytest.raises(WealdError, match=says) as refused:
                await b.journal.begin(request_, mark)
            assert refused.value.code is code
            a.journal.write("s", served.epoch, (9,))
            await asyncio.sleep(SOON_S)
            assert await vault.output() == (7, 8, 9)
            assert not a.fenced
            b.link.state = "lost"
            assert await forgotten(b)

    run(scenario())


def test_more_delivered_than_a_finished_text_has_is_another_text() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            record = await a.journal.begin(session(), MARK)
            a.journal.write("s", record.epoch, (7, 8), FinishReason.STOP)
            await asyncio.sleep(SOON_S)
            with pytest.raises(WealdError) as refused:
                await a.journal.begin(session([7, 8, 9]), MARK)
            assert refused.value.code is ErrorCode.DIVERGED

    run(scenario())


def test_without_a_prompt_the_journal_gives_all_of_it() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            await a.journal.begin(session([7, 8], temperature=0.3), MARK)
            assert (await b.journal.begin(nameless(), MARK)).session == session([7, 8], temperature=0.3)
            with pytest.raises(WealdError, match="nobody is not in the journal") as refused:
                await b.journal.begin(nameless("nobody"), MARK)
            assert refused.value.code is ErrorCode.UNKNOWN_SESSION

    run(scenario())


@pytest.mark.parametrize("leaving", [False, True])
def test_a_session_that_has_finished_says_so_and_leaves_nothing_here(leaving: bool) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            record = await a.journal.begin(session(), MARK)
            a.journal.write("s", record.epoch, (7, 8), FinishReason.LENGTH)
            if leaving:
                a.journal.leave("s", record.epoch)
            await asyncio.sleep(SOON_S)
            if leaving:
                a.journal.leave("s", record.epoch)
            again = await b.journal.begin(nameless(), MARK)
            assert (again.session.output, again.finish) == ((7, 8), FinishReason.LENGTH)
            b.journal.leave("s", again.epoch)
            assert (await vault.store.load("s")).finish is FinishReason.LENGTH
            assert await forgotten(a)
            assert await forgotten(b)

    run(scenario())


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
@pytest.mark.parametrize("outage", [False, True])
def test_a_session_that_is_left_is_still_written_and_then_forgotten(
    finish: FinishReason | None, outage: bool
) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            record = await a.journal.begin(session(), MARK)
            a.link.state = "lost" if outage else "up"
            a.journal.write("s", record.epoch, (7, 8), finish)
            a.journal.leave("s", record.epoch)
            await asyncio.sleep(SOON_S)
            a.link.state = "up"
            await asyncio.sleep(CALM_S)
            kept = await vault.store.load("s")
            assert (kept.session.output, kept.finish) == ((7, 8), finish)
            assert await forgotten(a)

    run(scenario())


def test_a_move_is_written_under_its_epoch_and_what_comes_late_is_not() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epoch = (await a.journal.begin(session(), MARK)).epoch
            a.journal.write("s", epoch, (7,))
            a.journal.write("s", epoch + 1, (8,))
            a.journal.write("s", epoch, (99,))
            a.journal.leave("s", epoch)
            await asyncio.sleep(SOON_S)
            a.journal.write("s", epoch + 1, (9,))
            await asyncio.sleep(SOON_S)
            kept = await vault.store.load("s")
            assert (kept.epoch, kept.session.output) == (epoch + 1, (7, 8, 9))
            a.journal.leave("s", epoch + 2)
            assert await forgotten(a)

    run(scenario())


@pytest.mark.parametrize("state", ["lost", "unheard", "late", "slow"])
def test_sessions_go_on_through_an_outage_and_the_store_has_all_of_them_afterwards(state: str) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epochs = {"a": (await a.journal.begin(session(id="a"), MARK)).epoch}
            a.journal.write("a", epochs["a"], (1, 2))
            await asyncio.sleep(SOON_S)
            a.link.state = state
            for token in range(3, 30):
                a.journal.write("a", epochs["a"], (token,))
                await asyncio.sleep(0.3)
            assert a.journal.lost == (state != "slow")
            epochs["b"] = (await a.journal.begin(session(id="b"), MARK)).epoch
            a.journal.write("b", epochs["b"], (5,))
            a.link.state = "up"
            await asyncio.sleep(CALM_S)
            assert not a.journal.lost
            assert await vault.output("a") == tuple(range(1, 30))
            assert await vault.output("b") == (5,)
            assert a.journal.backlog == 0
            assert not a.fenced
            assert (a.journal.counters["journal_failures"] > 0) == (state != "slow")

    run(scenario())


def test_what_is_committed_during_an_exchange_is_written_by_the_next() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epoch = (await a.journal.begin(session(), MARK)).epoch
            a.link.state = "slow"
            a.journal.write("s", epoch, (7,))
            await asyncio.sleep(GATHER_S + SLOW_S / 2)
            assert a.link.sizes == [1]
            a.journal.write("s", epoch, (8,), FinishReason.STOP)
            await asyncio.sleep(CALM_S)
            kept = await vault.store.load("s")
            assert (kept.session.output, kept.finish) == ((7, 8), FinishReason.STOP)

    run(scenario())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_an_answer_about_an_earlier_call_does_not_touch_the_one_that_began_meanwhile(
    known: bool, elsewhere: bool
) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            a.link.state = "up" if known else "lost"
            earlier = await a.journal.begin(session([7]), MARK)
            if elsewhere:
                await b.journal.begin(session([7]), MARK)
            a.link.state = "lost"
            a.journal.write("s", earlier.epoch, (8,))
            a.journal.leave("s", earlier.epoch)
            while not a.journal.lost:
                await asyncio.sleep(GATHER_S)
            asked, a.link.state = a.link.calls.total(), "slow"
            while a.link.calls.total() == asked:
                await asyncio.sleep(GATHER_S)
            later = await a.journal.begin(session([7]), MARK)
            assert later.session.output == (7, 8)
            await asyncio.sleep(CALM_S)
            a.journal.write("s", later.epoch, (9,))
            await asyncio.sleep(CALM_S)
            assert await vault.output() == (7, 8, 9)
            assert not a.fenced

    run(scenario())


def test_while_the_store_is_known_to_be_lost_a_session_begins_without_asking_it() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            before = await a.journal.begin(session(), MARK)
            a.journal.leave("s", before.epoch)
            a.link.state = "lost"
            first = await a.journal.begin(session([7]), MARK)
            assert a.journal.lost
            asked = a.link.calls.total()
            others = [await a.journal.begin(session(id=id), MARK) for id in "abc"]
            assert a.link.calls.total() == asked
            assert [first.session, *(record.session.id for record in others)] == [session([7]), *"abc"]
            assert min(record.epoch for record in (first, *others)) > before.epoch
            a.link.state = "up"
            await asyncio.sleep(CALM_S)
            # None of them has written anything, and yet the store knows them all now.
            assert await vault.store.load("s") == first
            assert [await vault.store.load(id) for id in "abc"] == others

    run(scenario())


@pytest.mark.parametrize("noticed", [False, True])
def test_what_only_a_lost_journal_knows_is_to_be_resumed_later(noticed: bool) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            await a.journal.begin(session([7]), MARK)
            b.link.state = "lost"
            if noticed:
                await b.journal.begin(session(id="other"), MARK)
            with pytest.raises(WealdError, match="only it knows session s; resume it again") as refused:
                await b.journal.begin(nameless(), MARK)
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.retry_after_s is not None
            b.link.state = "up"
            await asyncio.sleep(CALM_S)
            assert (await b.journal.begin(nameless(), MARK)).session.output == (7,)

    run(scenario())


def test_new_sessions_are_refused_when_the_backlog_is_full_and_accepted_when_it_is_written() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epoch = (await a.journal.begin(session(id="a"), MARK)).epoch
            a.link.state = "lost"
            a.journal.write("a", epoch, (1,) * (BACKLOG_TOKENS - 4))
            # An unknown session's prompt is held here, too.
            await a.journal.begin(session(id="b"), MARK)
            await a.journal.begin(session(id="c"), MARK)
            assert a.journal.backlog == BACKLOG_TOKENS + 2
            with pytest.raises(WealdError, match=f"is {BACKLOG_TOKENS + 2} tokens behind") as refused:
                await a.journal.begin(session(id="d"), MARK)
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.retry_after_s is not None
            a.journal.write("a", epoch, (2,))
            a.link.state = "up"
            await asyncio.sleep(CALM_S)
            await a.journal.begin(session(id="d"), MARK)
            assert (await vault.output("a"))[-2:] == (1, 2)

    run(scenario())


def test_after_an_outage_no_exchange_holds_more_than_fits_one() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            ids = [str(i) for i in range(9)]
            epochs = {id: (await a.journal.begin(session(id=id), MARK)).epoch for id in ids}
            for id, epoch in epochs.items():
                a.journal.write(id, epoch, range(EXCHANGE_TOKENS // 3))
            await asyncio.sleep(CALM_S)
            assert max(a.link.sizes) < EXCHANGE_TOKENS * 4 / 3
            assert len(a.link.sizes) == 3
            assert [len(await vault.output(id)) for id in ids] == [EXCHANGE_TOKENS // 3] * 9

    run(scenario())


@pytest.mark.parametrize("left", [(), (7,), (70, 71)])
def test_what_the_store_has_forgotten_it_is_told_again(left: tuple[int, ...]) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            record = await a.journal.begin(session([7]), MARK)
            a.journal.write("s", record.epoch, (8, 9))
            await asyncio.sleep(SOON_S)
            vault.wipe()
            if left:
                await vault.store.create(Record(session(left), MARK, record.epoch - 1))
            a.journal.write("s", record.epoch, (10,))
            await asyncio.sleep(3 * SOON_S)
            kept = await vault.store.load("s")
            assert kept == replace(record, session=session([7, 8, 9, 10]))

    run(scenario())


def test_a_session_that_began_in_an_outage_replaces_what_the_store_had_of_it() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            frozen = await a.journal.begin(session([7, 8, 9]), MARK)
            b.link.state = "lost"
            record = await b.journal.begin(session([7]), MARK)
            assert record.epoch > frozen.epoch
            b.journal.write("s", record.epoch, (80,))
            b.link.state = "up"
            await asyncio.sleep(CALM_S)
            assert await vault.output() == (7, 80)
            a.journal.write("s", frozen.epoch, (99,))
            await asyncio.sleep(SOON_S)
            assert await vault.output() == (7, 80)
            assert a.fenced == [("s", frozen.epoch)]

    run(scenario())


def test_a_session_that_comes_and_goes_in_an_outage_leaves_what_the_store_had_of_it() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            await a.journal.begin(session([7, 8, 9]), MARK)
            b.link.state = "lost"
            record = await b.journal.begin(session(), MARK)
            b.journal.leave("s", record.epoch)
            b.link.state = "up"
            await asyncio.sleep(CALM_S)
            assert await vault.output() == (7, 8, 9)
            assert await forgotten(b)

    run(scenario())


def test_who_was_frozen_while_another_took_the_session_over_is_fenced_and_its_other_sessions_are_not() -> (
    None
):
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a, process(vault) as b:
            stale = await a.journal.begin(session(), MARK)
            other = await a.journal.begin(session(id="other"), MARK)
            record = await b.journal.begin(session(), MARK)
            b.journal.write("s", record.epoch, (7,))
            a.journal.write("s", stale.epoch + 5, (99, 98))
            a.journal.write("other", other.epoch, (1,))
            await asyncio.sleep(SOON_S)
            assert (await vault.output(), await vault.output("other")) == ((7,), (1,))
            assert a.fenced == [("s", stale.epoch + 5)]
            assert a.journal.counters["fenced_sessions"] == 1
            assert a.journal.backlog == 0
            a.journal.write("s", stale.epoch + 5, (97,))
            await asyncio.sleep(SOON_S)
            assert a.fenced == [("s", stale.epoch + 5)]
            assert not b.fenced
            assert await forgotten(a)

    run(scenario())


@pytest.mark.parametrize("state", ["up", "lost"])
def test_what_a_session_left_unwritten_here_is_where_it_goes_on_here(state: str) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            earlier = await a.journal.begin(session([7], seed=3), MARK)
            a.journal.write("s", earlier.epoch, (8, 9))
            a.journal.leave("s", earlier.epoch)
            a.link.state = state
            record = await a.journal.begin(session([7], seed=4), MARK)
            assert record.session == session([7, 8, 9], seed=3)
            assert record.epoch > earlier.epoch
            a.journal.write("s", earlier.epoch, (99,))
            a.journal.leave("s", earlier.epoch)
            a.journal.write("s", record.epoch, (10,), FinishReason.LENGTH)
            a.link.state = "up"
            await asyncio.sleep(CALM_S)
            assert await vault.output() == (7, 8, 9, 10)
            assert not a.fenced

    run(scenario())


def test_a_session_still_served_here_is_superseded_by_a_later_call() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            earlier = await a.journal.begin(session(), MARK)
            a.journal.write("s", earlier.epoch, (7,))
            later = await a.journal.begin(session(), MARK)
            assert later.session.output == (7,)
            a.journal.write("s", earlier.epoch, (99,))
            a.journal.leave("s", earlier.epoch)
            a.journal.write("s", later.epoch, (8,))
            await asyncio.sleep(SOON_S)
            assert await vault.output() == (7, 8)

    run(scenario())


def test_of_two_who_begin_a_session_here_at_once_the_later_lease_stands() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            await a.journal.begin(session([7]), MARK)
            a.link.answer_s = [2.0, 1.0]
            first, second = await asyncio.gather(
                *(a.journal.begin(session([7]), MARK) for _ in range(2)), return_exceptions=True
            )
            assert isinstance(first, WealdError)
            assert first.code is ErrorCode.STALE_EPOCH
            assert isinstance(second, Record)
            a.journal.write("s", second.epoch, (8,))
            await asyncio.sleep(SOON_S)
            assert await vault.output() == (7, 8)

    run(scenario())


def test_a_session_that_expires_while_it_begins_is_a_new_one() -> None:
    class Expiring(Link):
        async def load(self, id: str) -> Record:
            self.vault.wipe()
            raise unknown(id)

    async def scenario() -> None:
        vault = Vault()
        await vault.store.create(Record(session([7]), MARK, MOVES))
        async with process(vault) as a:
            a.link.__class__ = Expiring
            record = await a.journal.begin(session([7, 8]), MARK)
            assert record.session.output == (7, 8)
            await asyncio.sleep(SOON_S)
            assert await vault.store.load("s") == record
            assert not a.journal.lost

    run(scenario())


def test_a_session_that_the_store_cannot_write_holds_up_no_other() -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            epochs = {id: (await a.journal.begin(session(id=id), MARK)).epoch for id in "abc"}
            a.link.refused.add("a")
            for id, epoch in epochs.items():
                a.journal.write(id, epoch, (7,))
            await asyncio.sleep(SOON_S)
            assert a.journal.backlog == 1
            assert [await vault.output(id) for id in "bc"] == [(7,), (7,)]
            assert a.journal.counters["journal_failures"] == 1
            a.link.refused.clear()
            await asyncio.sleep(CALM_S)
            assert a.journal.backlog == 0

    run(scenario())


@pytest.mark.parametrize("running", [False, True])
def test_at_the_end_what_is_left_is_written_if_the_store_takes_it_in_time(running: bool) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            journal = a.journal if running else Journal(a.link, lambda id, epoch: None)
            assert await journal.flush(0.1)
            record = await journal.begin(session(), MARK)
            a.link.state = "lost"
            journal.write("s", record.epoch, (7, 8))
            started = asyncio.get_running_loop().time()
            assert not await journal.flush(3.0)
            assert asyncio.get_running_loop().time() - started == pytest.approx(3.0)
            a.link.state = "slow"
            assert not await journal.flush(SLOW_S / 2)
            assert await journal.flush(3 * SLOW_S)
            assert await vault.output() == (7, 8)
            await asyncio.sleep(CALM_S)
            for token in (9, 10):
                journal.write("s", record.epoch, (token,))
                assert await journal.flush(3 * SLOW_S)
                assert (await vault.output())[-1] == token
                a.link.state = "up"

    run(scenario())


def test_an_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        vault = Vault()
        async with process(vault) as a:
            record = await a.journal.begin(session(), MARK)
            a.link.state = "lost"
            a.journal.write("s", record.epoch, (7,))
            await asyncio.sleep(CALM_S)
            assert a.journal.counters["journal_failures"] > 5
            a.link.state = "up"
            await asyncio.sleep(CALM_S)

    run(scenario())
    assert [message.split(",")[0].split(";")[0] for message in caplog.messages] == [
        "the journal is lost",
        "the journal is back",
    ]


IDS = "xy"
PROCESSES = range(3)
STATES = ["up", "slow", "slow", "lost", "unheard", "late"]
WRITES = st.tuples(
    st.just("write"), st.integers(0, 9), st.integers(1, 4), st.sampled_from([0.0, 0.02, 1.5 * GATHER_S, 1.0])
)
"""By whom, how many tokens, and the pause behind them."""
TAKES = st.tuples(st.just("take"), st.sampled_from(IDS), st.sampled_from(PROCESSES), st.integers(0, 3))
"""Which session, where, and how many tokens behind."""
LINKS = st.tuples(st.just("link"), st.sampled_from(PROCESSES), st.sampled_from(STATES))
RARE = st.one_of(
    st.tuples(st.sampled_from(["move", "leave"]), st.integers(0, 9)),
    st.tuples(st.just("kill"), st.sampled_from(PROCESSES)),
    st.tuples(st.just("wipe")),
)
OPERATIONS = st.one_of(WRITES, WRITES, WRITES, TAKES, TAKES, LINKS, LINKS, RARE)


@dataclass
class Writer:
    """One who serves a session, frozen or not."""

    id: str
    process: int
    epoch: int
    text: list[int]
    number: int
    state: str = "serves"
    """Or `left`, or `gone`: superseded in its own process, or killed with that."""


class World:
    """Processes on one store, and the callers, who know what was delivered."""

    def __init__(self, same_text: bool) -> None:
        """Each writer has a text of its own, or all write the same one."""
        self.vault = Vault()
        self.links = [Link(self.vault) for _ in PROCESSES]
        self.fenced: set[tuple[str, int]] = set()
        self.writers: list[Writer] = []
        self.running: list[asyncio.Task[None]] = []
        self.journals: list[Journal] = []
        self._same_text = same_text
        for link in self.links:
            self._start(len(self.journals), link)

    def _start(self, number: int, link: Link) -> None:
        journal = Journal(link, lambda id, epoch: self.fenced.add((id, epoch // MOVES)))
        self.journals[number:] = [journal, *self.journals[number + 1 :]]
        self.running[number:] = [asyncio.create_task(journal.run()), *self.running[number + 1 :]]

    def latest(self, id: str) -> Writer | None:
        return next((writer for writer in reversed(self.writers) if writer.id == id), None)

    async def take(self, id: str, number: int, lag: int) -> None:
        """The caller goes to a process, with all that was delivered but the last tokens."""
        latest = self.latest(id)
        text = latest.text if latest and self._same_text else []
        delivered = tuple(text[: len(text) - min(lag, len(text))])
        record = await self.journals[number].begin(session(delivered, id=id), MARK)
        output = record.session.output
        assert output[: len(delivered)] == delivered
        for writer in self.writers:
            if (writer.id, writer.process, writer.state) == (id, number, "serves"):
                self.journals[number].leave(id, writer.epoch)
                writer.state = "gone"
            assert writer.id != id or writer.epoch < record.epoch
        self.writers.append(Writer(id, number, record.epoch, list(output), len(self.writers)))
        if self._same_text:
            assert list(output) == [self.token(self.writers[-1], i) for i in range(len(output))]

    def token(self, writer: Writer, position: int) -> int:
        return 1000 * (1 if self._same_text else 1 + writer.number) + position

    async def write(self, writer: Writer, count: int, pause_s: float = 0) -> None:
        tokens = [self.token(writer, len(writer.text) + i) for i in range(count)]
        writer.text += tokens
        self.journals[writer.process].write(writer.id, writer.epoch, tokens)
        await asyncio.sleep(pause_s)

    async def move(self, writer: Writer) -> None:
        writer.epoch += 1

    async def leave(self, writer: Writer) -> None:
        self.journals[writer.process].leave(writer.id, writer.epoch)
        writer.state = "left"

    async def kill(self, number: int) -> None:
        self.running[number].cancel()
        for writer in self.writers:
            if (writer.process, writer.state) == (number, "serves"):
                writer.state = "gone"
        self._start(number, self.links[number])

    async def do(self, name: str, *arguments: Any) -> None:
        serving = [writer for writer in self.writers if writer.state == "serves"]
        match name, *arguments:
            case (("write" | "move" | "leave"), choice, *more):
                if serving:
                    await getattr(self, name)(serving[choice % len(serving)], *more)
            case "link", number, state:
                self.links[number].state = state
            case "wipe", *_:
                if self._same_text:
                    self.vault.wipe()
            case _:
                await getattr(self, name)(*arguments)

    async def check(self) -> None:
        """After calm: the store has the text of the last who took a session, and the others know."""
        for link in self.links:
            link.state = "up"
        await asyncio.sleep(CALM_S)
        ids = {latest.id for latest in map(self.latest, IDS) if latest and latest.state == "serves"}
        serving = [writer for writer in self.writers if writer.id in ids and writer.state == "serves"]
        # A store that was wiped cannot tell a frozen writer before it knows the other one again.
        for _ in range(2):
            for writer in serving:
                await self.write(writer, 1)
            await asyncio.sleep(CALM_S)
        for writer in serving:
            fenced = (writer.id, writer.epoch // MOVES) in self.fenced
            assert fenced == (writer is not self.latest(writer.id))
            if not fenced:
                kept = await self.vault.store.load(writer.id)
                assert (kept.session.output, kept.epoch) == (tuple(writer.text), writer.epoch)
        assert [journal.backlog for journal in self.journals] == [0] * len(self.journals)
        assert not any(journal.lost for journal in self.journals)

    async def finish(self) -> None:
        """Callers take what is theirs once more, and it comes to its end."""
        for id in IDS:
            await self.take(id, 0, 0)
            await self.write(self.writers[-1], 1)
        await self.check()
        for id in IDS:
            latest = self.latest(id)
            assert latest
            self.journals[0].write(id, latest.epoch, (), FinishReason.LENGTH)
            self.journals[0].leave(id, latest.epoch)
        await asyncio.sleep(SOON_S)
        for id in IDS:
            kept = await self.vault.store.load(id)
            assert (kept.session.output, kept.finish) == (tuple(self.latest(id).text), FinishReason.LENGTH)
        assert not any(task.done() for task in self.running)
        assert [await journal.flush(0) for journal in self.journals] == [True] * len(self.journals)


@settings(max_examples=300)
@given(operations=st.lists(OPERATIONS, max_size=60), same_text=st.booleans())
def test_whatever_fails_the_store_has_the_text_of_the_last_lease_and_all_others_are_fenced(
    operations: list[tuple[Any, ...]], same_text: bool
) -> None:
    async def scenario() -> None:
        world = World(same_text)
        for id in IDS:
            await world.take(id, 0, 0)
        for operation in operations:
            await world.do(*operation)
        await world.check()
        await world.finish()
        for task in world.running:
            task.cancel()
        await asyncio.gather(*world.running, return_exceptions=True)

    run(scenario())
