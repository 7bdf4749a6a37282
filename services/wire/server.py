"""A gRPC server around one of our services: health, reflection, certificates, an address."""

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.types.errors import invalid
from services.wire.transport import OPTIONS, Tls
from weald.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

_OPTIONS = (
    *OPTIONS,
    # Without it a second server on the same port would silently get half of the calls.
    ("grpc.so_reuseport", 0),
    # Clients give signs of life more often than the 5 minutes a server tolerates by itself.
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is listening."""

    port: int
    """The port in use, also where port 0 was asked for."""
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer

    async def drain(self) -> None:
        """Tell health checks, for good, that no more calls should come; those that come are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Drain, refuse new calls, and end the running ones after so many seconds at most."""
        await self.drain()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_for_termination()


async def serve(
    servicer: verify_pb2_grpc.VerifyServiceServicer | draft_pb2_grpc.DraftServiceServicer,
    address: str,
    tls: Tls | None = None,
) -> Server:
    """Serve one service at host:port; port 0 takes a free one. Its health is that of the process and by name.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the address cannot be used or a TLS file is no good.
    """
    server = grpc.aio.server(options=_OPTIONS)
    if isinstance(servicer, verify_pb2_grpc.VerifyServiceServicer):
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
        service = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
    else:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
        service = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, address, tls)
    await server.start()
    return Server(port, server, health_servicer)


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    try:
        if tls:
            return server.add_secure_port(address, tls.server())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        what = "; see that its TLS files are in PEM and belong together" if tls else ""
        raise invalid(f"cannot listen at {address}: choose a free port of this machine{what}") from error
