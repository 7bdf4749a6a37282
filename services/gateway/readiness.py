"""Whether sessions can be served now."""

import asyncio
import time

from services.gateway.drafters import Drafters
from services.types.errors import WealdError
from services.types.messages import DraftStatus

ANSWER_S = 2.0
"""A draft replica that does not say within so long that it has a verify replica serves nobody now."""
FRESH_S = 1.0
"""What was found out holds for so long: probes need no key, and each costs a call to every draft replica."""


class Readiness:
    """Asks the draft replicas, not too often."""

    def __init__(self, drafters: Drafters) -> None:
        self._drafters = drafters
        self._asking: asyncio.Task[bool] | None = None
        self._until = 0.0

    async def now(self) -> bool:
        """Whether there is a draft replica with a verify replica behind it."""
        if self._asking is None or (self._asking.done() and time.monotonic() > self._until):
            self._asking = asyncio.create_task(self._ask())
        # A prober that leaves must not leave the others without an answer.
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        linked = await asyncio.gather(*map(self._linked, self._drafters.live()))
        self._until = time.monotonic() + FRESH_S
        return any(linked)

    async def _linked(self, address: str) -> bool:
        status = await self.ask(address)
        return status is not None and any(status.verifiers.values())

    async def ask(self, address: str) -> DraftStatus | None:
        """What a draft replica says of itself; None when it does not answer."""
        async with self._drafters.client(address) as client:
            try:
                return await client.status(ANSWER_S)
            except WealdError:
                return None
