"""From the URL of a store to the store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from services.sessions.memory import MemoryStore
from services.sessions.store import Store
from services.types.errors import invalid


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """The store of a URL, closed at the end; it need not be reachable yet.

    Args:
        url: `memory://`, `redis://…`, `rediss://…`, or `file:///…` for a file that holds one of the last
            two, as `weald store` prints it.

    Raises:
        WealdError: `INVALID_ARGUMENT` when it is none of these.
    """
    store = _store(url)
    try:
        yield store
    finally:
        await store.close()


def _store(url: str) -> Store:
    if url == "memory://":
        return MemoryStore()
    if url.startswith("file://"):
        url = _held_by(url)
    if not url.startswith(("redis://", "rediss://")):
        raise invalid(
            "a store is memory://, redis://:PASSWORD@HOST:PORT, rediss:// likewise, or the file:///… that "
            "`weald store` printed"
        )
    from services.sessions.redis import RedisStore

    return RedisStore(url)


def _held_by(file_url: str) -> str:
    parts = urlsplit(file_url)
    try:
        return Path(unquote(parts.path)).read_text().strip()
    except (OSError, ValueError) as error:
        raise invalid(f"{file_url} cannot be read; start `weald store` and name what it prints") from error
