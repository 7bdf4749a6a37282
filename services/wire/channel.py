"""Channels to the services, and calls with a deadline."""

from typing import TypeVar

import grpc

from services.wire.errors import calling
from services.wire.transport import OPTIONS, Tls

_OPTIONS = (
    *OPTIONS,
    # A replica that comes back is found again soon; by itself gRPC would wait up to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # So long is a connection waited for, too: a frozen replica accepts none, and does not refuse.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The services talk within one cluster; a proxy of the environment is for what lies outside.
    ("grpc.enable_http_proxy", 0),
)

Request = TypeVar("Request")
Response = TypeVar("Response")


def connect(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to host:port; it connects with the first call, and again by itself. Close it.

    Raises:
        WealdError: `INVALID_ARGUMENT` for a TLS file that cannot be read.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, _OPTIONS)
    name = (("grpc.ssl_target_name_override", tls.name),) if tls.name else ()
    return grpc.aio.secure_channel(address, tls.channel(), (*_OPTIONS, *name))


async def ask(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request, within_s: float
) -> Response:
    """The answer to one request, within so many seconds.

    Raises:
        WealdError: `DEADLINE_EXCEEDED`, `UNAVAILABLE`, or what the service aborted with.
    """
    with calling():
        return await method(request, timeout=within_s)
