"""A TCP proxy on loopback whose link can be dropped, cut off without a word, or delayed."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 2**16
_SETTLE_S = 0.01


class Proxy:
    """Stands in front of one server; everything belongs to the event loop."""

    def __init__(self, target: str | None) -> None:
        """Made by `proxied`, which lets it listen."""
        self.address = ""
        """host:port at which it listens, always the same."""
        self.target = target
        """host:port of the server behind it; without one, connections end at once."""
        self.delay_s = 0.0
        """Seconds that everything takes longer, each way."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._dropped = False
        self.connections: set[asyncio.Task[None]] = set()
        """Those that are carried now."""

    def drop(self) -> None:
        """End all connections, and every new one at once, until `restore`."""
        self._dropped = True
        for connection in self.connections:
            connection.cancel()

    def blackhole(self) -> None:
        """Accept connections and forward nothing, as when a network is cut, until `restore`."""
        self._flowing.clear()

    def restore(self) -> None:
        """Serve as before; what a blackhole held back arrives now."""
        self._dropped, self.delay_s = False, 0.0
        self._flowing.set()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Carry one connection that came in until either side ends it."""
        carrying = asyncio.current_task()
        assert carrying
        self.connections.add(carrying)
        ends = [writer]
        try:
            if self._dropped or self.target is None:
                return
            host, port = self.target.rsplit(":", 1)
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.append(far_writer)
            ways = [
                asyncio.create_task(self._carry(reader, far_writer)),
                asyncio.create_task(self._carry(far_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancelled(*ways)
        except OSError:
            return
        except asyncio.CancelledError:
            for end in ends:
                end.transport.abort()
        finally:
            self.connections.discard(carrying)
            for end in ends:
                end.close()

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One way of a connection. What is read waits in line, so that a delay costs no throughput."""
        loop = asyncio.get_running_loop()
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def forward() -> None:
            while True:
                due, piece = await line.get()
                await asyncio.sleep(due - loop.time())
                await self._flowing.wait()
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()

        forwarding = asyncio.create_task(forward())
        try:
            with suppress(OSError):
                piece = b"."
                while piece:
                    piece = await reader.read(_PIECE)
                    line.put_nowait((loop.time() + self.delay_s, piece))
                await forwarding
        finally:
            await _cancelled(forwarding)


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(target: str | None = None) -> AsyncIterator[Proxy]:
    """A proxy at a free port of loopback, in front of host:port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.drop()
        # A connection accepted just now takes a few turns of the loop to arrive at `serve`, which ends it.
        await asyncio.sleep(_SETTLE_S)
        await asyncio.gather(*proxy.connections, return_exceptions=True)
        await server.wait_closed()
