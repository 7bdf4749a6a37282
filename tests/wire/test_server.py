import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call
from services.types.sampling import SamplingParams
from services.wire.clients import DraftClient, VerifyClient
from services.wire.server import serve
from services.wire.transport import Tls

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("name", ["Verify", "Draft"])
def test_health_is_told_of_the_process_and_by_service_until_it_drains(
    loopback: Any, verifies: Any, drafts: Any, name: str
) -> None:
    servicer = {"Verify": verifies, "Draft": drafts}[name]

    async def scenario() -> None:
        async with loopback(servicer()) as (server, channel):
            stub = health_pb2_grpc.HealthStub(channel)

            async def health(service: str) -> int:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
                return int(answer.status)

            known = ["", f"weald.v1.{name}Service"]
            assert [await health(service) for service in known] == [SERVING, SERVING]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health("weald.v1.NoService")
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            await server.drain()
            assert [await health(service) for service in known] == [NOT_SERVING, NOT_SERVING]
            client = {"Verify": VerifyClient, "Draft": DraftClient}[name](channel)
            assert await client.status(30) == servicer.status

    asyncio.run(scenario())


def test_reflection_lists_the_service_and_gives_its_proto(loopback: Any, verifies: Any) -> None:
    async def scenario() -> list[Any]:
        async with loopback(verifies()) as (_, channel):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = (
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="weald.v1.VerifyService"),
            )
            return [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=30)]

    services, file = asyncio.run(scenario())
    assert {service.name for service in services.list_services_response.service} == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "weald.v1.VerifyService",
    }
    assert b"weald/v1/verify.proto" in file.file_descriptor_response.file_descriptor_proto[0]


def test_an_address_in_use_or_of_another_machine_is_refused(loopback: Any, verifies: Any) -> None:
    async def scenario() -> None:
        async with loopback(verifies()) as (server, _):
            for address in (f"127.0.0.1:{server.port}", "192.0.2.1:0", "nonsense"):
                with pytest.raises(WealdError, match=f"cannot listen at {address}") as raised:
                    await serve(verifies(), address)
                assert raised.value.code is ErrorCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_stopping_ends_what_still_runs(loopback: Any, drafts: Any) -> None:
    async def scenario() -> None:
        service = drafts()
        async with loopback(service) as (server, channel):
            events = DraftClient(channel).generate(Call("s", (1,), (), SamplingParams()))
            await anext(events)
            await server.stop(0)
            await server.wait()
            with pytest.raises(WealdError) as raised:
                await anext(events)
            assert raised.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED}
            assert service.left.is_set()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def issue(tmp_path: Path, authority: trustme.CA) -> Callable[..., Tls]:
    """`issue(name, authority)` writes the files of one side, which trusts the module's authority."""

    def write(name: str, by: trustme.CA = authority) -> Tls:
        tls = Tls(*(tmp_path / f"{name}.{kind}" for kind in ("certificate", "key", "authority")))
        pair = by.issue_cert(name)
        pair.private_key_pem.write_to_path(tls.key)
        for pem in pair.cert_chain_pems:
            pem.write_to_path(tls.certificate, append=True)
        authority.cert_pem.write_to_path(tls.authority)
        return tls

    return write


async def ask_status(loopback: Any, servicer: Any, server: Tls | None, channel: Tls | None) -> None:
    async with loopback(servicer, server, channel) as (_, connected):
        assert await VerifyClient(connected).status(30) == servicer.status


def test_two_sides_with_certificates_of_one_authority_understand_each_other(
    loopback: Any, verifies: Any, issue: Callable[..., Tls]
) -> None:
    asyncio.run(ask_status(loopback, verifies(), issue("127.0.0.1"), issue("drafter")))


def test_certificates_may_be_issued_to_one_name_instead_of_addresses(
    loopback: Any, verifies: Any, issue: Callable[..., Tls]
) -> None:
    tls = issue("weald.internal")
    asyncio.run(ask_status(loopback, verifies(), tls, replace(tls, name="weald.internal")))
    with pytest.raises(WealdError) as raised:
        asyncio.run(ask_status(loopback, verifies(), tls, tls))
    assert raised.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("client", ["plain", "without a certificate", "of another authority"])
def test_a_client_without_a_certificate_of_the_authority_is_refused(
    loopback: Any, verifies: Any, issue: Callable[..., Tls], client: str
) -> None:
    tls = issue("127.0.0.1")

    class Anonymous(Tls):
        def channel(self) -> grpc.ChannelCredentials:
            return grpc.ssl_channel_credentials(self.authority.read_bytes())

    channels = {
        "plain": None,
        "without a certificate": Anonymous(tls.certificate, tls.key, tls.authority),
        "of another authority": issue("drafter", trustme.CA()),
    }
    with pytest.raises(WealdError, match="certificates are right") as raised:
        asyncio.run(ask_status(loopback, verifies(), tls, channels[client]))
    assert raised.value.code is ErrorCode.UNAVAILABLE


def test_a_server_that_is_not_of_the_authority_is_refused(
    loopback: Any, verifies: Any, issue: Callable[..., Tls]
) -> None:
    with pytest.raises(WealdError, match="certificates are right") as raised:
        asyncio.run(ask_status(loopback, verifies(), issue("127.0.0.1", trustme.CA()), issue("drafter")))
    assert raised.value.code is ErrorCode.UNAVAILABLE


def test_tls_files_that_are_missing_or_no_pem_are_named(verifies: Any, issue: Callable[..., Tls]) -> None:
    tls = issue("127.0.0.1")
    missing = replace(tls, key=tls.key.with_name("missing"))
    for credentials in (missing.server, missing.channel):
        with pytest.raises(WealdError, match=r"the TLS file .*missing cannot be read: No such file"):
            credentials()
    tls.key.write_text("nonsense")
    with pytest.raises(WealdError, match="TLS files are in PEM"):
        asyncio.run(serve(verifies(), "127.0.0.1:0", tls))
