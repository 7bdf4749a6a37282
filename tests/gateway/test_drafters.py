"""Which draft replica a caller chooses, from those that are named and those that the registry lists."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.gateway import drafters as module
from services.gateway.drafters import Drafters
from services.sessions import registry
from services.sessions.memory import MemoryStore
from services.sessions.registry import Directory
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, DraftStatus
from services.types.replica import Replica, ReplicaKind
from services.types.sampling import SamplingParams
from services.wire import convert
from services.wire.server import Server, serve
from weald.v1 import draft_pb2, draft_pb2_grpc

NAMED = ["a:1", "b:1", "c:1"]
PATIENCE_S = 60.0
"""For what comes within milliseconds unless something is broken."""


def listed(address: str, sessions: int = 0, draining: bool = False, target: str = "target") -> Replica:
    return Replica(ReplicaKind.DRAFT, address, target.encode(), target, sessions, draining)


class Waits(draft_pb2_grpc.DraftServiceServicer):
    """Begins no generation, and ends none."""

    async def Generate(self, request: draft_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    async def Status(self, request: draft_pb2.DraftServiceStatusRequest, context: Any) -> Any:
        return convert.draft_status_to_proto(DraftStatus("head", b"f", "float32", "cpu", 0, 1, 1, {}, {}))


class Registry:
    """A registry, and a caller that follows it; a heartbeat takes no time."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.directory = Directory(self.store, ReplicaKind.DRAFT)
        self.drafters: Drafters

    async def list(self, *replicas: Replica) -> None:
        """List exactly these, and wait until the caller knows."""
        for old in await self.store.replicas(ReplicaKind.DRAFT):
            await self.store.deregister(old.kind, old.address)
        for replica in replicas:
            await self.store.register(replica, 1000.0)
        async with asyncio.timeout(PATIENCE_S):
            while self.directory.replicas != sorted(replicas, key=lambda replica: replica.address):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def following(
    *replicas: Replica, named: Sequence[str] = (), model: str | None = None
) -> AsyncIterator[Registry]:
    """A caller of a registry that lists these replicas."""
    built = Registry()
    for replica in replicas:
        await built.store.register(replica, 1000.0)
    async with Drafters(named, built.directory, model) as built.drafters:
        yield built


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[list[Server]]:
    """So many replicas."""
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(count):
            servers.append(await serve(Waits(), "127.0.0.1:0"))
            stack.push_async_callback(servers[-1].stop, 0)
        yield servers


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of the registry is read all the time."""
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.001)


def test_sessions_of_one_prefix_go_to_the_same_replica_and_others_spread() -> None:
    drafters = Drafters(NAMED)
    chosen = {(1, 2, i): drafters.choose((1, 2, i)) for i in range(50)}
    assert chosen == {tokens: Drafters(NAMED[::-1]).choose(tokens) for tokens in chosen}
    assert set(chosen.values()) == set(NAMED)


def test_a_replica_to_avoid_is_chosen_only_where_there_is_no_other() -> None:
    drafters = Drafters(NAMED)
    first = drafters.choose((1,))
    second = drafters.choose((1,), {first})
    third = drafters.choose((1,), {first, second})
    assert {first, second, third} == set(NAMED)
    assert drafters.choose((1,), set(NAMED)) == first


def test_without_any_replica_the_sentence_says_what_to_do() -> None:
    async def scenario() -> None:
        async with following() as registered:
            for drafters in (Drafters(), registered.drafters):
                with pytest.raises(WealdError, match="no draft replica is connected; start one") as raised:
                    drafters.choose((1,))
                assert raised.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


def test_replicas_come_and_go_with_the_registry_beside_those_that_are_named() -> None:
    async def scenario() -> None:
        async with following(listed("r:1"), named=["a:1"]) as registered:
            assert registered.drafters.live() == {"a:1": 0, "r:1": 0}
            await registered.list(listed("r:1", 4), listed("s:1", 2))
            assert registered.drafters.live() == {"a:1": 0, "r:1": 4, "s:1": 2}
            await registered.list(listed("a:1", 3))
            assert registered.drafters.live() == {"a:1": 3}
            await registered.list()
            assert registered.drafters.live() == {"a:1": 0}

    asyncio.run(scenario())


def test_a_draining_replica_takes_no_session_whether_it_is_named_or_not() -> None:
    async def scenario() -> None:
        replicas = listed("a:1", draining=True), listed("r:1", draining=True), listed("s:1")
        async with following(*replicas, named=["a:1"]) as registered:
            assert registered.drafters.live() == {"s:1": 0}
            await registered.list(listed("a:1"), listed("r:1", draining=True), listed("s:1", draining=True))
            assert registered.drafters.live() == {"a:1": 0}, "it has been started again"

    asyncio.run(scenario())


def test_a_replica_that_says_it_is_overloaded_is_passed_over() -> None:
    async def scenario() -> None:
        async with following(*(listed(address) for address in NAMED)) as registered:
            first = registered.drafters.choose((1,))
            await registered.list(*(listed(address, 8 * (address == first)) for address in NAMED))
            assert registered.drafters.choose((1,)) != first

    asyncio.run(scenario())


def test_calls_that_run_here_count_before_any_heartbeat_tells_of_them() -> None:
    async def scenario() -> None:
        async with serving(2) as servers:
            addresses = [f"127.0.0.1:{server.port}" for server in servers]
            async with AsyncExitStack() as stack, Drafters(addresses) as drafters:
                chosen = []
                for _ in range(20):
                    chosen.append(drafters.choose((1,)))
                    await stack.enter_async_context(drafters.client(chosen[-1]))
                assert {address: chosen.count(address) for address in addresses} == drafters.live()
                assert min(drafters.live().values()) >= 6
                await stack.aclose()
                assert drafters.live() == dict.fromkeys(addresses, 0)

    asyncio.run(scenario())


def test_of_several_targets_the_registry_gives_only_replicas_of_the_one_that_is_wanted() -> None:
    async def scenario() -> None:
        replicas = listed("a:1", target="one"), listed("b:1", target="two"), listed("c:1", target="two")
        async with following(*replicas, model="two") as registered:
            assert registered.drafters.live() == {"b:1": 0, "c:1": 0}
        async with following(*replicas, model="three") as registered:
            with pytest.raises(WealdError, match="draft replicas of one, two, none of three") as raised:
                registered.drafters.choose((1,))
            assert raised.value.code is ErrorCode.UNAVAILABLE
        async with following(replicas[0], model="./another/name/of/it") as registered:
            with pytest.raises(WealdError, match="draft replicas of one, none of "):
                registered.drafters.choose((1,))

    asyncio.run(scenario())


def test_a_session_stays_with_the_target_that_began_it() -> None:
    async def scenario() -> None:
        replicas = [replace(listed(f"{name}:1", target=name), model="same") for name in ("a", "b")]
        async with following(*replicas, model="same") as registered:
            drafters = registered.drafters
            assert drafters.live() == {"a:1": 0, "b:1": 0}
            for name in ("a", "b"):
                target = drafters.target(f"{name}:1")
                assert target == name.encode()
                assert drafters.live(target) == {f"{name}:1": 0}
                assert {drafters.choose((i,), (), target) for i in range(20)} == {f"{name}:1"}
            assert drafters.target("c:1") is None
            with pytest.raises(WealdError) as raised:
                drafters.choose((1,), (), b"c")
            assert raised.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


def test_calls_share_a_connection_which_goes_with_a_replica_that_is_not_listed_any_more() -> None:
    async def scenario() -> None:
        async with serving(2) as servers:
            gone, stays = (f"127.0.0.1:{server.port}" for server in servers)
            async with following(listed(gone), listed(stays)) as registered:
                drafters = registered.drafters
                async with drafters.client(gone) as first:
                    async with drafters.client(gone) as second:
                        assert first is second
                        await registered.list(listed(stays))
                    assert await first.status(PATIENCE_S), "a call that runs is not disturbed"
                async with drafters.client(stays) as client:
                    await client.status(PATIENCE_S)
                async with drafters.client(stays) as again, drafters.client(gone) as new:
                    assert again is client
                    assert new is not first
                    assert await new.status(PATIENCE_S)

    asyncio.run(scenario())


def test_only_a_replica_that_can_be_reached_answers() -> None:
    async def scenario() -> None:
        async with serving(2) as (up, down):
            await down.stop(0)
            async with Drafters() as drafters:
                assert await drafters.answers(f"127.0.0.1:{up.port}")
                assert not await drafters.answers(f"127.0.0.1:{down.port}")

    asyncio.run(scenario())


def test_leaving_ends_what_still_runs() -> None:
    async def scenario() -> None:
        async with serving(1) as (server,):
            address = f"127.0.0.1:{server.port}"
            async with AsyncExitStack() as stack:
                async with Drafters([address]) as drafters:
                    client = await stack.enter_async_context(drafters.client(address))
                    events = client.generate(Call("s", (1,), (), SamplingParams()))
                    waiting = asyncio.create_task(anext(events))
                    await asyncio.sleep(0)
                with pytest.raises(WealdError) as raised:
                    await waiting
                assert raised.value.code is ErrorCode.CANCELLED

    asyncio.run(scenario())


def test_a_registry_that_does_not_answer_holds_nobody_up_who_has_named_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lost(MemoryStore):
        async def replicas(self, kind: ReplicaKind) -> list[Replica]:
            raise WealdError(ErrorCode.UNAVAILABLE, "the store cannot be reached")

    monkeypatch.setattr(module, "LIST_S", 0.05)

    async def scenario() -> None:
        async with Drafters(NAMED, Directory(Lost(), ReplicaKind.DRAFT)) as drafters:
            assert drafters.live() == dict.fromkeys(NAMED, 0)

    asyncio.run(scenario())


def test_choosing_needs_no_torch() -> None:
    program = (
        "import services.gateway.calls, sys; print({'torch', 'transformers', 'redis'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "set()\n"
