"""What both ends of a connection agree on: size of messages, signs of life, certificates."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from services.types.errors import invalid

MESSAGE_LIMIT = 4 * 1024 * 1024
"""Bytes of one message at most."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    # A peer that vanished without closing its connection, as a lost node does, is noticed within 8 s.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # gRPC also pings while data flows, and would wait a minute for the answer to that.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM of mutual TLS: each side shows its certificate, and trusts those of one authority."""

    certificate: Path
    """With the chain up to the authority, if there is one."""
    key: Path
    authority: Path
    name: str | None = None
    """What certificates of peers are issued to; None: the host in their address."""

    def server(self) -> grpc.ServerCredentials:
        """Credentials of a server that refuses clients without a certificate of the authority.

        Raises `WealdError(INVALID_ARGUMENT)` for a file that cannot be read.
        """
        pair = (_read(self.key), _read(self.certificate))
        return grpc.ssl_server_credentials([pair], _read(self.authority), require_client_auth=True)

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials of a client. Raises `WealdError(INVALID_ARGUMENT)` for a file that cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.authority), _read(self.key), _read(self.certificate))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise invalid(f"the TLS file {file} cannot be read: {error.strerror}") from error
