"""A session's events as its caller gets them, whichever draft replicas are lost meanwhile."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from services.gateway.drafters import Drafters
from services.telemetry.logs import about
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, Draining, Event, Finished, Moved, Round, Started
from services.types.replica import ReplicaKind
from services.types.retry import backoff
from services.types.sampling import SEED_BITS
from services.types.session import Cursor, FinishReason, running_hash

ATTEMPTS = 14
"""Calls of one session that may fail in a row; a committed token begins the count anew."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Between two of them: a session waits about half a minute for a replica to come back."""
RETRYABLE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED, ErrorCode.RESOURCE_EXHAUSTED})
"""What another call can cure. A process that is killed, stopped or cut off ends its calls with one of the
first two, wherever it stood; all other errors would come again, or say that the session is another's now."""
ONE_REPLICAS_OWN = frozenset({ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.INCOMPATIBLE_CHECKPOINT})
"""What says nothing of other replicas: these are asked at once. A registry can list several targets."""

_log = logging.getLogger(__name__)


async def generate(
    drafters: Drafters, call: Call, within_s: float, cursor: Cursor | None = None
) -> AsyncGenerator[Event]:
    """The events of a session behind `call.output`, from `Started` to `Finished`, each token once.

    A draft replica that is lost, or drains, is left for another one; `Moved` tells of it. `cursor` is how far
    an earlier caller of the session got: the output must come to the same. Close the iterator to end early.

    Raises:
        WealdError: what another call cannot cure, or did not within `ATTEMPTS` of them; `DEADLINE_EXCEEDED`
            after `within_s` seconds; `DIVERGED` when the text is not the one delivered before; `INTERNAL`
            when tokens are missing. Its sentence ends with what was delivered and how to go on behind it.
    """
    delivery, attempts = _Delivery(call, cursor), _Attempts(drafters, call, within_s)
    try:
        while not delivery.finish:
            try:
                async with aclosing(_one_call(drafters, delivery, attempts)) as events:
                    async for event in events:
                        yield event
            except WealdError as error:
                if not delivery.finish:
                    await attempts.failed(error, delivery.reached.delivered > 0)
        if not delivery.ended:
            yield delivery.end()
    except WealdError as error:
        raise delivery.explained(error) from error


async def _one_call(
    drafters: Drafters, delivery: "_Delivery", attempts: "_Attempts"
) -> AsyncGenerator[Event]:
    """What one call adds, until the end, or until its replica drains and another one can go on."""
    address = attempts.choose()
    async with (
        drafters.client(address) as client,
        aclosing(client.generate(delivery.rest, attempts.left_s)) as events,
    ):
        async for event in events:
            if isinstance(event, Draining):
                if await attempts.elsewhere():
                    delivery.handed_over = True
                    return
            elif fresh := delivery.take(event, address):
                if isinstance(fresh, Round):
                    attempts.progressed()
                else:
                    attempts.began()
                yield fresh
    if not delivery.finish:
        raise WealdError(
            ErrorCode.INTERNAL, f"the draft replica at {address} left the session without its end"
        )


class _Attempts:
    """Which draft replica is called next, and when."""

    def __init__(self, drafters: Drafters, call: Call, within_s: float) -> None:
        self._drafters = drafters
        self._prefix = call.prompt or tuple(call.session.encode())
        """By which a replica is chosen; sessions whose prompts are not known here spread."""
        self._session, self._traceparent = call.session, call.traceparent
        self._within_s = within_s
        self._deadline = asyncio.get_running_loop().time() + within_s
        self._called = ""
        """The replica of the latest call; empty when there was none."""
        self._target: bytes | None = None
        """Fingerprint of the target that said the first tokens; no other one can go on."""
        self.progressed()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - asyncio.get_running_loop().time()

    def began(self) -> None:
        """The replica called has taken the session."""
        self._target = self._target or self._drafters.target(self._called)

    def progressed(self) -> None:
        """Tokens came: what failed before does not count any more."""
        self._failures = 0
        self._pauses = backoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        self._avoid: set[str] = set()
        self._full: WealdError | None = None

    def choose(self) -> str:
        """The address of the replica to call now. Raises `WealdError(UNAVAILABLE)` when there is none."""
        self._called = ""
        self._called = self._drafters.choose(self._prefix, self._avoid, self._target)
        return self._called

    async def elsewhere(self) -> bool:
        """Whether another replica answers, so that the one called, which is draining, can be left."""
        self._avoid.add(self._called)
        while self._others():
            address = self._drafters.choose(self._prefix, self._avoid, self._target)
            if await self._drafters.answers(address):
                return True
            self._avoid.add(address)
        return False

    async def failed(self, error: WealdError, delivered: bool) -> None:
        """Wait until it makes sense to call again. Raises the error where it does not."""
        _log.info(
            "a call failed at %s: %s",
            self._called or "no draft replica",
            error.message,
            extra=about(self._session, self._traceparent),
        )
        if self._called:
            self._avoid.add(self._called)
        others = self._others()
        if error.code is ErrorCode.RESOURCE_EXHAUSTED:
            self._full = error
        if error.code in ONE_REPLICAS_OWN and others:
            return
        if error.code not in RETRYABLE:
            raise error
        if self._full and not others and not delivered:
            raise self._full
        self._failures += 1
        if self._failures == ATTEMPTS:
            raise error
        pause_s = next(self._pauses)
        if not others:
            pause_s = max(pause_s, error.retry_after_s or 0.0)
            self._avoid.clear()
        if pause_s >= self.left_s:
            raise WealdError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"no draft replica went on within {self._within_s:g} s; the last attempt: {error.message}",
            )
        await asyncio.sleep(pause_s)

    def _others(self) -> set[str]:
        """Live replicas that have not failed since the latest progress."""
        return self._drafters.live(self._target).keys() - self._avoid


class _Delivery:
    """What a caller has been given of a session."""

    def __init__(self, call: Call, cursor: Cursor | None) -> None:
        """Begin behind `call.output`."""
        params = call.params
        if call.prompt and params.seed is None:
            # Drawn here, so that every replica continues the text of the first.
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        self._call = replace(call, params=params)
        self._cursor = cursor
        """Until the output has come that far, and is the same."""
        self._start = len(call.prompt) or None
        """Position of the output's first token; the first round tells, where the prompt is not known here."""
        self._output = list(call.output)
        self._cached: int | None = None
        """As the first `Started` says."""
        self.handed_over = False
        """Whether the replica that served it last was left because it was draining."""
        self.finish: FinishReason | None = None
        self.ended = False
        """Whether `Finished` has been given."""

    @property
    def rest(self) -> Call:
        """The call for what is lacking."""
        # Without a prompt the service would not know where output begins: the journal's comes again then.
        return replace(self._call, output=tuple(self._output) if self._call.prompt else ())

    @property
    def reached(self) -> Cursor:
        """How far the caller is, or was before."""
        return self._cursor or Cursor.behind(self._call.session, self._output)

    def take(self, event: Event, address: str) -> Event | None:
        """What is new to the caller in an event of the replica at `address`."""
        match event:
            case Started():
                return self._begin(event, address)
            case Round():
                return self._continue(event)
            case Finished(output_tokens=count):
                if count != len(self._output):
                    raise _broken(f"it has {count} output tokens in the end, {len(self._output)} have come")
                self._compare(event.finish_reason)
                self.finish, self.ended = event.finish_reason, True
        return event

    def end(self) -> Finished:
        """The last event of a session whose replica was lost after its last token."""
        assert self.finish
        return Finished(self.finish, self._start or 0, len(self._output), self._cached or 0)

    def explained(self, error: WealdError) -> WealdError:
        """An error with what was delivered and how to go on, where a session can."""
        reached, message = self.reached, error.message
        if reached.delivered and error.code is not ErrorCode.UNKNOWN_SESSION:
            message += (
                f"; {reached.delivered} token{'s were' if reached.delivered > 1 else ' was'} delivered, "
            )
            if error.code is ErrorCode.DIVERGED:
                message += f"what the journal has comes with --resume {reached.session}"
            else:
                message += f"go on with --resume {reached}"
        return WealdError(error.code, message, retry_after_s=error.retry_after_s)

    def _begin(self, started: Started, address: str) -> Started | Moved:
        if self._cached is None:
            self._cached = started.cached_tokens
            return started
        moved = Moved(ReplicaKind.DRAFT, address, lost=not self.handed_over)
        self.handed_over = False
        return moved

    def _continue(self, round: Round) -> Round | None:
        """A round, or what is new in it: what the journal has can come again, and must come the same."""
        if self._start is None:
            self._start = round.position
        at, have = round.position - self._start, len(self._output)
        if not 0 <= at <= have:
            raise _broken(f"a round begins at token {at} of the output, {have} have come")
        again, fresh = round.tokens[: have - at], round.tokens[have - at :]
        if again != tuple(self._output[at : at + len(again)]):
            raise _diverged(f"from token {at} of the output on it comes again with others")
        self._output += fresh
        self._compare(round.finish)
        self.finish = round.finish
        if again:
            round = replace(
                round,
                position=round.position + len(again),
                tokens=fresh,
                tree=None,
                accepted=(),
                logprobs=round.logprobs[len(again) :],
            )
        return round if fresh or round.finish else None

    def _compare(self, finish: FinishReason | None) -> None:
        """Hold what has come against what an earlier caller got."""
        if not (cursor := self._cursor):
            return
        if len(self._output) >= cursor.delivered:
            if running_hash(self._output[: cursor.delivered]) != cursor.digest:
                raise _diverged(f"its first {cursor.delivered} tokens are others")
            self._cursor = None
        elif finish:
            raise _diverged(f"it ends after {len(self._output)} tokens")


def _broken(what: str) -> WealdError:
    return WealdError(ErrorCode.INTERNAL, f"the draft service has lost or repeated tokens: {what}")


def _diverged(what: str) -> WealdError:
    return WealdError(ErrorCode.DIVERGED, f"the text is not the one that was delivered: {what}")
