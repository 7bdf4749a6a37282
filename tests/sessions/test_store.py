"""What every store does: one suite for both, and the same random deeds done to both at once."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sessions.memory import MemoryStore
from services.sessions.opening import opened
from services.sessions.store import Append, Store
from services.types.errors import ErrorCode, WealdError
from services.types.replica import Replica, ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason, Record, Session

Make = Callable[..., Any]

DRAFT, VERIFY = ReplicaKind.DRAFT, ReplicaKind.VERIFY
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def with_one(stores: Any, deed: Callable[[Store], Coroutine[Any, Any, None]], **times: float) -> None:
    """Do something with one store."""

    async def scenario() -> None:
        async with stores.opened(**times) as store:
            await deed(store)

    asyncio.run(scenario())


async def refused(call: Awaitable[object]) -> ErrorCode:
    """The code of the error that a call ends with."""
    with pytest.raises(WealdError) as refusal:
        await call
    return refusal.value.code


def shown(results: list[int | WealdError]) -> list[int | ErrorCode]:
    """What appends came to, errors as their codes."""
    return [result.code if isinstance(result, WealdError) else result for result in results]


def test_a_session_is_loaded_as_it_was_created(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        whole = record("a", (0, 2**32 - 1, 5), (9, 0, 2**32 - 2), 3 * MOVES + 1, LENGTH, seed=2**64 - 1)
        for one in (record("b"), whole, record("} {ä", output=(4,))):
            await store.create(one)
            assert await store.load(one.session.id) == one

    with_one(stores, deed)


def test_a_session_is_created_once(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        await store.create(record("a", output=(4,)))
        assert await refused(store.create(record("a", output=(5,)))) is ErrorCode.ALREADY_EXISTS
        assert (await store.load("a")).session.output == (4,)

    with_one(stores, deed)


def test_an_unknown_session_is_told_as_such(stores: Any) -> None:
    async def deed(store: Store) -> None:
        assert await refused(store.load("a")) is ErrorCode.UNKNOWN_SESSION
        assert await refused(store.lease("a")) is ErrorCode.UNKNOWN_SESSION
        results = await store.append([Append("a", MOVES, 0, (1,))])
        assert shown(results) == [ErrorCode.UNKNOWN_SESSION]
        assert await refused(store.load("a")) is ErrorCode.UNKNOWN_SESSION

    with_one(stores, deed)


def test_a_lease_has_an_epoch_above_all_before_and_changes_nothing_else(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        known = record("a", output=(4, 5), finish=STOP)
        await store.create(known)
        epochs = [known.epoch]
        for _ in range(50):
            leased = await store.lease("a")
            assert leased == replace(known, epoch=leased.epoch) == await store.load("a")
            epochs.append(leased.epoch)
        assert epochs == sorted(set(epochs))
        assert all(epoch % MOVES == 0 for epoch in epochs)

    with_one(stores, deed)


def test_a_lease_outranks_the_moves_under_the_one_before_to_the_last_bit(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        high = 2**53 - 3 * MOVES
        await store.create(record("a", epoch=high + MOVES - 1))
        assert (await store.lease("a")).epoch == high + MOVES
        assert shown(await store.append([Append("a", high + 2 * MOVES - 1, 0, (1,))])) == [1]
        assert (await store.load("a")).epoch == high + 2 * MOVES - 1
        assert (await store.lease("a")).epoch == high + 2 * MOVES
        late = Append("a", high + 2 * MOVES - 1, 1, (2,))
        assert shown(await store.append([late])) == [ErrorCode.STALE_EPOCH]

    with_one(stores, deed)


def test_tokens_are_appended_in_order_and_repeating_it_changes_nothing(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        await store.create(record("a"))
        first, second = Append("a", MOVES, 0, (4, 5, 6)), Append("a", MOVES, 3, (7,))
        assert await store.append([first]) == [3]
        assert await store.append([second]) == [4]
        assert await store.append([first, second, first]) == [4, 4, 4]
        assert await store.append([Append("a", MOVES, 2, ()), Append("a", MOVES, 4, ())]) == [4, 4]
        assert (await store.load("a")).session.output == (4, 5, 6, 7)

    with_one(stores, deed)


def test_an_append_behind_a_gap_writes_nothing_and_says_where_the_output_ends(
    stores: Any, record: Make
) -> None:
    async def deed(store: Store) -> None:
        known = record("a", output=(4, 5))
        await store.create(known)
        gaps = [Append("a", MOVES, 3, (7,), STOP), Append("a", 2 * MOVES, 9, (), LENGTH)]
        assert await store.append(gaps) == [2, 2]
        assert await store.load("a") == known

    with_one(stores, deed)


def test_whoever_writes_under_an_older_epoch_is_fenced(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        await store.create(record("a", output=(4,)))
        leased = await store.lease("a")
        late = [Append("a", MOVES, 0, (9, 9), STOP), Append("a", leased.epoch - 1, 1, (9,))]
        assert shown(await store.append(late)) == [ErrorCode.STALE_EPOCH] * 2
        assert await store.load("a") == leased
        assert await store.append([Append("a", leased.epoch, 1, (5,))]) == [2]

    with_one(stores, deed)


@pytest.mark.parametrize(
    ("position", "tokens", "output"),
    [
        (2, (8,), (4, 5, 8)),
        (2, (), (4, 5)),
        (0, (8, 9), (8, 9)),
        (0, (), ()),
        (4, (8,), (4, 5, 6, 7, 8)),
        (3, (8, 9, 10), (4, 5, 6, 8, 9, 10)),
    ],
)
def test_a_newer_epoch_becomes_the_known_one_and_its_tokens_replace_all_from_there(
    position: int, tokens: tuple[int, ...], output: tuple[int, ...], stores: Any, record: Make
) -> None:
    async def deed(store: Store) -> None:
        known = record("a", output=(4, 5, 6, 7), finish=STOP)
        await store.create(known)
        assert await store.append([Append("a", MOVES + 1, position, tokens)]) == [len(output)]
        session = replace(known.session, output=output)
        assert await store.load("a") == replace(known, session=session, epoch=MOVES + 1, finish=None)
        late = Append("a", MOVES, len(output), (1,))
        assert shown(await store.append([late])) == [ErrorCode.STALE_EPOCH]

    with_one(stores, deed)


def test_a_finish_stays_until_a_newer_epoch_writes(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        async def finish() -> FinishReason | None:
            return (await store.load("a")).finish

        await store.create(record("a"))
        assert await store.append([Append("a", MOVES, 0, (4,), STOP)]) == [1]
        assert await finish() is STOP
        assert await store.append([Append("a", MOVES, 0, (4,))]) == [1]
        assert await finish() is STOP
        assert await store.append([Append("a", MOVES, 1, (), LENGTH)]) == [1]
        assert await finish() is LENGTH
        assert await store.append([Append("a", MOVES + 1, 1, (5,))]) == [2]
        assert await finish() is None

    with_one(stores, deed)


def test_many_appends_in_one_exchange_each_come_to_their_own_result(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        for id in "abcd":
            await store.create(record(id))
        leased = await store.lease("b")
        results = await store.append(
            [
                Append("a", MOVES, 0, (4,)),
                Append("b", MOVES, 0, (4,)),
                Append("x", MOVES, 0, (4,)),
                Append("c", MOVES, 1, (4,)),
                Append("a", MOVES, 1, (5, 6), STOP),
                Append("b", leased.epoch, 0, (7,)),
                Append("d", MOVES, 0, ()),
            ]
        )
        unknown, stale = ErrorCode.UNKNOWN_SESSION, ErrorCode.STALE_EPOCH
        assert shown(results) == [1, stale, unknown, 0, 3, 1, 0]
        outputs = [(await store.load(id)).session.output for id in "abcd"]
        assert outputs == [(4, 5, 6), (7,), (), ()]
        assert await store.append([]) == []

    with_one(stores, deed)


def test_an_unfinished_session_is_forgotten_some_time_after_its_last_write(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        for id in ("idle", "written", "leased", "loaded"):
            await store.create(record(id, output=(4,)))
        await stores.pass_time(1.0)
        await store.append([Append("written", MOVES, 1, (5,))])
        await store.lease("leased")
        await store.load("loaded")
        await stores.pass_time(1.3)
        assert await refused(store.load("idle")) is ErrorCode.UNKNOWN_SESSION
        assert await refused(store.lease("loaded")) is ErrorCode.UNKNOWN_SESSION
        assert (await store.load("written")).session.output == (4, 5)
        assert (await store.load("leased")).session.output == (4,)
        await stores.pass_time(2.1)
        assert await refused(store.load("written")) is ErrorCode.UNKNOWN_SESSION
        results = await store.append([Append("leased", 2**52, 0, (4,))])
        assert shown(results) == [ErrorCode.UNKNOWN_SESSION]
        await store.create(record("idle"))
        assert (await store.load("idle")).session.output == ()

    with_one(stores, deed, unfinished_s=2.0, finished_s=60.0)


def test_a_finished_session_is_forgotten_after_a_time_of_its_own(stores: Any, record: Make) -> None:
    async def deed(store: Store) -> None:
        await store.create(record("open"))
        await store.create(record("created", finish=STOP))
        await store.create(record("appended"))
        await store.append([Append("appended", MOVES, 0, (4,), LENGTH)])
        await store.create(record("reopened", finish=STOP))
        await store.append([Append("reopened", MOVES + 1, 0, (4,))])
        await stores.pass_time(0.6)
        assert await refused(store.load("created")) is ErrorCode.UNKNOWN_SESSION
        assert await refused(store.load("appended")) is ErrorCode.UNKNOWN_SESSION
        assert (await store.load("open")).finish is None
        assert (await store.load("reopened")).finish is None

    with_one(stores, deed, unfinished_s=60.0, finished_s=0.5)


def replica_at(address: str, kind: ReplicaKind = VERIFY, **more: Any) -> Replica:
    """A replica as it lists itself."""
    return Replica(kind, address, b"\x00\xff", "smollm2-135m", **more)


def test_replicas_are_listed_by_kind_and_address_as_they_last_said(stores: Any) -> None:
    async def deed(store: Store) -> None:
        assert await store.replicas(VERIFY) == []
        for one in (replica_at("b:1"), replica_at("a:2"), replica_at("a:10"), replica_at("c:1", DRAFT)):
            await store.register(one, 60.0)
        busy = replica_at("b:1", sessions=3, draining=True)
        await store.register(busy, 60.0)
        assert await store.replicas(VERIFY) == [replica_at("a:10"), replica_at("a:2"), busy]
        assert await store.replicas(DRAFT) == [replica_at("c:1", DRAFT)]

    with_one(stores, deed)


def test_a_replica_drops_out_when_its_heartbeat_stops(stores: Any) -> None:
    async def deed(store: Store) -> None:
        for one in (replica_at("silent:1"), replica_at("alive:1"), replica_at("patient:1")):
            await store.register(one, 60.0 if one.address == "patient:1" else 2.0)
        await stores.pass_time(1.0)
        await store.register(replica_at("alive:1"), 2.0)
        assert len(await store.replicas(VERIFY)) == 3
        await stores.pass_time(1.3)
        assert await store.replicas(VERIFY) == [replica_at("alive:1"), replica_at("patient:1")]
        await stores.pass_time(1.0)
        assert await store.replicas(VERIFY) == [replica_at("patient:1")]
        await store.register(replica_at("silent:1"), 60.0)
        assert await store.replicas(VERIFY) == [replica_at("patient:1"), replica_at("silent:1")]

    with_one(stores, deed)


def test_a_replica_that_leaves_is_listed_no_longer(stores: Any) -> None:
    async def deed(store: Store) -> None:
        await store.register(replica_at("a:1"), 60.0)
        await store.register(replica_at("b:1"), 60.0)
        await store.deregister(DRAFT, "a:1")
        assert len(await store.replicas(VERIFY)) == 2
        for _ in range(2):
            await store.deregister(VERIFY, "a:1")
            assert await store.replicas(VERIFY) == [replica_at("b:1")]

    with_one(stores, deed)


bias = st.dictionaries(
    st.integers(0, 2**32 - 1), st.one_of(st.just(-math.inf), st.floats(-100, 100)), max_size=4
)
parameters = st.builds(
    lambda end, **values: SamplingParams(**values, **end),
    st.sampled_from([{}, {"ignore_eos": True}, {"json_schema": '{"const": "é\\n"}'}]),
    max_tokens=st.integers(8, 2**32),
    min_tokens=st.integers(0, 8),
    temperature=st.one_of(st.just(0.0), st.floats(1e-5, 1e300)),
    top_k=st.integers(0, 2**32),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.one_of(st.none(), st.integers()),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=bias,
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)


@given(parameters)
def test_parameters_come_back_exactly(wiped: Make, opened_in_redis: Make, params: SamplingParams) -> None:
    async def scenario() -> None:
        async with opened_in_redis(wiped()) as store:
            kept = Record(Session("a", (1,), params, 0), b"", MOVES)
            await store.create(kept)
            found = await store.load("a")
            assert found == kept
            assert repr(found) == repr(kept)

    asyncio.run(scenario())


IDS = st.sampled_from("ab")
TOKENS = st.lists(st.integers(0, 9), max_size=4).map(tuple)
FINISH = st.sampled_from([None, None, None, STOP, LENGTH])


@dataclass
class Witness:
    """One store, and the epochs it has given to each session, which differ from another's by the clock."""

    store: Store
    epochs: dict[str, list[int]] = field(default_factory=dict)

    async def create(self, id: str, output: tuple[int, ...], finish: FinishReason | None) -> Any:
        """Begin a session."""
        known = Record(Session(id, (1,), SamplingParams(), 0, output), b"f", MOVES, finish)
        return await self._told(self.store.create(known))

    async def load(self, id: str) -> Any:
        """What is known of it."""
        return await self._told(self.store.load(id))

    async def lease(self, id: str) -> Any:
        """Take it over."""
        return await self._told(self.store.lease(id))

    async def append(self, *appends: tuple[str, int, int, int, tuple[int, ...], FinishReason | None]) -> Any:
        """Write under one of the epochs that were given, or a move under it."""
        written = [
            Append(id, self._given(id)[lease % len(self._given(id))] + move, *rest)
            for id, lease, move, *rest in appends
        ]
        return shown(await self.store.append(written))

    async def register(self, kind: ReplicaKind, address: str, sessions: int) -> Any:
        """List a replica."""
        return await self.store.register(replica_at(address, kind, sessions=sessions), 60.0)

    async def deregister(self, kind: ReplicaKind, address: str) -> Any:
        """List it no longer."""
        return await self.store.deregister(kind, address)

    async def replicas(self, kind: ReplicaKind) -> Any:
        """Which are listed."""
        return await self.store.replicas(kind)

    def _given(self, id: str) -> list[int]:
        return self.epochs.setdefault(id, [MOVES])

    async def _told(self, call: Awaitable[Record | None]) -> Any:
        try:
            found = await call
        except WealdError as error:
            return error.code
        if found is None:
            return None
        given = self._given(found.session.id)
        if found.epoch >= given[-1] + MOVES:
            given.append(found.epoch)
        under = max(epoch for epoch in given if epoch <= found.epoch)
        return replace(found, epoch=0), given.index(under), found.epoch - under


append = st.tuples(IDS, st.integers(-2, 1), st.integers(0, 2), st.integers(0, 6), TOKENS, FINISH)
deeds = st.one_of(
    st.tuples(st.just("create"), IDS, TOKENS, FINISH),
    st.tuples(st.just("load"), IDS),
    st.tuples(st.just("lease"), IDS),
    st.lists(append, min_size=1, max_size=4).map(lambda appends: ("append", *appends)),
    st.tuples(
        st.just("register"), st.sampled_from(ReplicaKind), st.sampled_from(["a:1", "b:1"]), st.integers(0, 3)
    ),
    st.tuples(st.just("deregister"), st.sampled_from(ReplicaKind), st.sampled_from(["a:1", "b:1"])),
    st.tuples(st.just("replicas"), st.sampled_from(ReplicaKind)),
)


@given(st.lists(deeds, max_size=30))
def test_both_stores_come_to_the_same_whatever_is_done_to_them(
    wiped: Make, opened_in_redis: Make, done: list[tuple[Any, ...]]
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            redis = Witness(await stack.enter_async_context(opened_in_redis(wiped())))
            memory = Witness(MemoryStore())
            for name, *arguments in [*done, ("load", "a"), ("load", "b")]:
                told = [await getattr(witness, name)(*arguments) for witness in (memory, redis)]
                assert told[0] == told[1], (name, arguments)

    asyncio.run(scenario())


def test_a_url_names_its_store(url: str, record: Make, tmp_path: Path) -> None:
    file = tmp_path / "with space" / "url"
    file.parent.mkdir()
    file.write_text(f"{url}\n")

    async def scenario() -> None:
        async with opened("memory://") as store:
            assert isinstance(store, MemoryStore)
        async with opened(url) as store:
            await store.create(record("a"))
        async with opened(file.as_uri()) as store:
            assert await store.load("a") == record("a")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "memory",
        "memory://x",
        "localhost:6379",
        "http://localhost",
        "unix:///run/redis",
        "redis://",
        "redis://:se/cret@localhost",
        "redis://:se?cret@localhost",
        "redis://:se#cret@localhost",
        "redis://:secret@localhost:port",
        "redis://:secret@[localhost",
        "redis://localhost/sessions",
        "redis://localhost?db=1",
        "redis://localhost?ssl_ca_certs=ca.pem",
        "rediss://localhost?ssl_cert_reqs=none",
        "rediss://:secret@localhost?ssl_ca_certs=/nowhere/ca.pem",
        "file:///nowhere/url",
    ],
)
def test_what_names_no_store_is_refused_without_repeating_what_may_be_secret(wrong: str) -> None:
    async def scenario() -> None:
        async with opened(wrong):
            pass

    with pytest.raises(WealdError) as refusal:
        asyncio.run(scenario())
    assert refusal.value.code is ErrorCode.INVALID_ARGUMENT
    assert "cret" not in str(refusal.value)
