"""The store in Redis, which outlives those who write it; docs/sessions.md has the layout of its keys."""

import asyncio
import hashlib
import json
import math
import re
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import AuthenticationError, NoScriptError, RedisError

from services.sessions.store import FINISHED_S, UNFINISHED_S, Append, exists, stale, unknown
from services.types.errors import ErrorCode, WealdError, invalid
from services.types.replica import Replica, ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason, Record, Session, lease_epoch

CONNECT_S = 1.0
ANSWER_S = 2.0
"""For a whole call, the connection included; a Redis that waits for its disk can be silent for a second."""
MAX_CONNECTIONS = 16
PORT = 6379
TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
FORM = (
    "the URL of a store in Redis is redis://:PASSWORD@HOST:PORT/DATABASE, special characters of the password "
    "written like %2F; with rediss:// the connection is encrypted, and ?ssl_ca_certs=FILE, ssl_certfile and "
    "ssl_keyfile can name PEM files"
)
PARAMS = tuple(field.name for field in fields(SamplingParams))

# In all scripts KEYS[1] is the hash of the session and KEYS[2] its output; the hash says whether there is a
# session, so the output outlives it by a second.
_KEEP = """
local function keep(finish, unfinished_ms, finished_ms)
  local ms = finish == '' and unfinished_ms or finished_ms
  redis.call('PEXPIRE', KEYS[1], ms)
  redis.call('PEXPIRE', KEYS[2], ms + 1000)
end
"""
_READ = """
local found = redis.call('HMGET', KEYS[1], 'prompt', 'params', 'seed', 'fingerprint', 'epoch', 'finish')
if not found[1] then return false end
found[7] = redis.call('GET', KEYS[2]) or ''
return found
"""
# Arguments: what `_READ` returns, then the times to live.
CREATE = f"""{_KEEP}
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'prompt', ARGV[1], 'params', ARGV[2], 'seed', ARGV[3], 'fingerprint', ARGV[4],
  'epoch', ARGV[5], 'finish', ARGV[6])
redis.call('SET', KEYS[2], ARGV[7])
keep(ARGV[6], ARGV[8], ARGV[9])
return 1
"""
LOAD = _READ
# Arguments: the least epoch of a lease, then the times to live. Epochs are below 2**53, so these are exact.
LEASE = f"""{_KEEP}
local found = redis.call('HMGET', KEYS[1], 'epoch', 'finish')
if not found[1] then return false end
local epoch = math.max((math.floor(found[1] / {MOVES}) + 1) * {MOVES}, tonumber(ARGV[1]))
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch))
keep(found[2], ARGV[2], ARGV[3])
{_READ}"""
# Arguments: epoch, position, tokens, finish, then the times to live. Returns nothing for an unknown session,
# the known epoch as text when the given one is stale, else the number of output tokens.
APPEND = f"""{_KEEP}
local found = redis.call('HMGET', KEYS[1], 'epoch', 'finish')
if not found[1] then return false end
local epoch, known, finish = tonumber(ARGV[1]), tonumber(found[1]), found[2]
if epoch < known then return found[1] end
local start, length = 4 * ARGV[2], redis.call('STRLEN', KEYS[2])
if start > length then return length / 4 end
if epoch > known then
  if start == 0 then
    redis.call('SET', KEYS[2], '')
  elseif start < length then
    redis.call('SET', KEYS[2], redis.call('GETRANGE', KEYS[2], 0, start - 1))
  end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  finish = ''
end
if ARGV[4] ~= '' then finish = ARGV[4] end
if finish ~= found[2] then redis.call('HSET', KEYS[1], 'finish', finish) end
length = redis.call('SETRANGE', KEYS[2], start, ARGV[3])
keep(finish, ARGV[5], ARGV[6])
return length / 4
"""
APPEND_SHA = hashlib.sha1(APPEND.encode()).hexdigest()
# Here KEYS[1] has the replicas by address and KEYS[2] when each expires, in ms by the clock of Redis.
_PRUNE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, address in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], address)
  redis.call('ZREM', KEYS[2], address)
end
"""
# Arguments: address, what is known of the replica, its time to live.
REGISTER = f"""{_PRUNE}
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
redis.call('PEXPIREAT', KEYS[1], last)
redis.call('PEXPIREAT', KEYS[2], last)
"""
DEREGISTER = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
"""
REPLICAS = f"{_PRUNE} return redis.call('HVALS', KEYS[1])"


class RedisStore:
    """Sessions and replicas in a Redis, from 6.2 on; it connects with the first call."""

    def __init__(self, url: str, unfinished_s: float = UNFINISHED_S, finished_s: float = FINISHED_S) -> None:
        """Keep sessions for so many seconds after their last write.

        Args:
            url: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, or `rediss://…` for TLS; the latter can
                name files by `?ssl_ca_certs=…&ssl_certfile=…&ssl_keyfile=…`.

        Raises:
            WealdError: `INVALID_ARGUMENT` when it is none.
        """
        self._address = _address(url)
        self._ttls = tuple(_milliseconds(seconds) for seconds in (unfinished_s, finished_s))
        # Answers have no time limit of their own there: with it redis-py loses cancellations now and then.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=None,
            protocol=2,
            driver_info=None,
        )
        self._client: Any = Redis.from_pool(pool)

    async def create(self, record: Record) -> None:
        """As `Store` says."""
        session = record.session
        written = await self._run(
            CREATE,
            _session_keys(session.id),
            _packed(session.prompt),
            _params_to_json(session.params),
            session.seed,
            record.fingerprint,
            record.epoch,
            record.finish or "",
            _packed(session.output),
            *self._ttls,
        )
        if not written:
            raise exists(session.id)

    async def load(self, id: str) -> Record:
        """As `Store` says."""
        return _record(id, await self._run(LOAD, _session_keys(id)))

    async def lease(self, id: str) -> Record:
        """As `Store` says."""
        return _record(id, await self._run(LEASE, _session_keys(id), lease_epoch(), *self._ttls))

    async def append(self, appends: Sequence[Append]) -> list[int | WealdError]:
        """As `Store` says."""
        replies: list[Any] = []
        # A Redis that has restarted knows no script by its digest: then each brings it along.
        for command, script in (("EVALSHA", APPEND_SHA), ("EVAL", APPEND)):
            async with self._reached(), self._client.pipeline(transaction=False) as pipeline:
                for append in appends:
                    pipeline.execute_command(
                        command,
                        script,
                        2,
                        *_session_keys(append.session),
                        append.epoch,
                        append.position,
                        _packed(append.tokens),
                        append.finish or "",
                        *self._ttls,
                    )
                replies = await pipeline.execute(raise_on_error=False)
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
        return [self._appended(*pair) for pair in zip(appends, replies, strict=True)]

    async def register(self, replica: Replica, ttl_s: float) -> None:
        """As `Store` says."""
        known = _replica_to_json(replica)
        await self._run(REGISTER, _registry_keys(replica.kind), replica.address, known, _milliseconds(ttl_s))

    async def deregister(self, kind: ReplicaKind, address: str) -> None:
        """As `Store` says."""
        await self._run(DEREGISTER, _registry_keys(kind), address)

    async def replicas(self, kind: ReplicaKind) -> list[Replica]:
        """As `Store` says."""
        listed = await self._run(REPLICAS, _registry_keys(kind))
        return sorted((_replica(kind, text) for text in listed), key=lambda replica: replica.address)

    async def close(self) -> None:
        """As `Store` says."""
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def _run(self, script: str, keys: tuple[str, str], *arguments: str | int | bytes) -> Any:
        async with self._reached():
            return await self._client.execute_command("EVAL", script, len(keys), *keys, *arguments)

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(ANSWER_S):
                yield
        except (RedisError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> WealdError:
        if isinstance(error, AuthenticationError):
            what = "refuses the user or password; correct them in the URL of the store"
        else:
            reason = str(error).rstrip(".") or f"no answer within {ANSWER_S:g} s"
            what = f"does not serve: {reason}; see that Redis runs there, then try again"
        return WealdError(ErrorCode.UNAVAILABLE, f"the store at {self._address} {what}")

    def _appended(self, append: Append, reply: int | bytes | Exception | None) -> int | WealdError:
        match reply:
            case None:
                return unknown(append.session)
            case int():
                return reply
            case bytes():
                return stale(append.session, append.epoch, int(reply))
            case Exception():
                return self._failed(reply)


def _address(url: str) -> str:
    """host:port of a URL, which is checked: redis-py ignores what it does not understand."""
    try:
        parts = urlsplit(url)
        port, options = parts.port or PORT, parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise invalid(FORM) from None  # what the error says can hold part of a password
    allowed = {"redis": frozenset[str](), "rediss": TLS_OPTIONS}.get(parts.scheme)
    well_formed = parts.hostname and re.fullmatch("(/[0-9]*)?", parts.path) and not parts.fragment
    if allowed is None or not well_formed or not options.keys() <= allowed:
        raise invalid(FORM)
    for file in chain.from_iterable(options.values()):
        if not Path(file).is_file():
            raise invalid(f"{file} is no file; correct the URL of the store")
    return f"[{parts.hostname}]:{port}" if ":" in str(parts.hostname) else f"{parts.hostname}:{port}"


def _session_keys(id: str) -> tuple[str, str]:
    # What stands in braces decides where a Redis Cluster keeps a key; it is never empty.
    return f"weald:{{session:{id}}}", f"weald:{{session:{id}}}:output"


def _registry_keys(kind: ReplicaKind) -> tuple[str, str]:
    return f"weald:{{replicas:{kind}}}", f"weald:{{replicas:{kind}}}:expiry"


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def _record(id: str, found: list[bytes] | None) -> Record:
    if found is None:
        raise unknown(id)
    try:
        prompt, params, seed, fingerprint, epoch, finish, output = found
        return Record(
            Session(id, _unpacked(prompt), _params_from_json(params), int(seed), _unpacked(output)),
            fingerprint,
            int(epoch),
            FinishReason(finish.decode()) if finish else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, WealdError) as error:
        raise _foreign(f"session {id}", error) from error


def _foreign(what: str, error: Exception) -> WealdError:
    return WealdError(
        ErrorCode.INTERNAL,
        f"what the store has of {what} is not what this version of Weald writes ({error!r}); let the version "
        "that wrote it go on, or use another database",
    )


def _params_to_json(params: SamplingParams) -> str:
    values = {name: getattr(params, name) for name in PARAMS}
    # JSON has no infinity, and its keys are texts.
    bias = [[token, None if bias == -math.inf else bias] for token, bias in params.logit_bias.items()]
    return json.dumps(values | {"logit_bias": bias}, separators=(",", ":"), allow_nan=False)


def _params_from_json(text: bytes) -> SamplingParams:
    # A parameter that an older version did not have is absent, one that this version does not have an error.
    values = json.loads(text)
    bias = {token: -math.inf if bias is None else bias for token, bias in values["logit_bias"]}
    stops = tuple(values["stop_token_ids"])
    return SamplingParams(**values | {"logit_bias": bias, "stop_token_ids": stops})


def _replica_to_json(replica: Replica) -> str:
    known = asdict(replica) | {"fingerprint": replica.fingerprint.hex()}
    return json.dumps(known, separators=(",", ":"))


def _replica(kind: ReplicaKind, text: bytes) -> Replica:
    # During an upgrade replicas of two versions are listed together: what one says besides is not read.
    try:
        known = json.loads(text)
        fingerprint = bytes.fromhex(known["fingerprint"])
        return Replica(
            kind,
            known["address"],
            fingerprint,
            known["model"],
            known["sessions"],
            known["draining"],
            known.get("node", ""),
            known.get("metrics", ""),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _foreign("a replica", error) from error
