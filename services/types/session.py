"""A session: one generation, from its prompt to its finish; what is kept of it, and how one goes on."""

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.types.errors import invalid
from services.types.sampling import SamplingParams

MOVES = 1 << 10
"""Epochs of one lease: its own, and one for each move to another verify replica."""


class FinishReason(StrEnum):
    """Why a session ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Session:
    """What a generation is a function of, besides the target (DESIGN section 4)."""

    id: str
    prompt: tuple[int, ...]
    """Token ids; at least one."""
    params: SamplingParams
    seed: int
    """The seed actually used: the request's, or a random one."""
    output: tuple[int, ...] = ()
    """Tokens committed before the session was opened here; it goes on behind them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Record:
    """What the journal has of a session."""

    session: Session
    """With the output committed so far."""
    fingerprint: bytes
    """Of the target the text is a function of."""
    epoch: int
    """Of the lease; whoever writes under an older one is fenced."""
    finish: FinishReason | None = None


def lease_epoch(above: int = 0) -> int:
    """The epoch of a new lease: above `above`, and above those given before elsewhere, by the wall clock.

    A multiple of `MOVES`, and below 2**53, so that every language counts it exactly.
    """
    return max(above // MOVES + 1, time.time_ns() // 1_000_000) * MOVES


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a caller has got in a session's output, to go on from there; as text, `ID:COUNT:DIGEST`."""

    session: str
    delivered: int
    """Output tokens that the caller has."""
    digest: str
    """`running_hash` of these."""

    @staticmethod
    def behind(session: str, output: Sequence[int]) -> "Cursor":
        """The cursor of a caller that has this output."""
        return Cursor(session, len(output), running_hash(output))

    @staticmethod
    def parse(text: str) -> "Cursor":
        """Read a cursor; an id alone stands before all output.

        Raises:
            WealdError: `INVALID_ARGUMENT` when it is neither.
        """
        if ":" not in text:
            return Cursor.behind(text, ())
        try:
            session, count, digest = text.rsplit(":", 2)
            return Cursor(session, int(count), digest)
        except ValueError as error:
            raise invalid(
                f"{text!r} names no session; write ID, or ID:COUNT:DIGEST as it was told"
            ) from error

    def __str__(self) -> str:
        return f"{self.session}:{self.delivered}:{self.digest}"


def running_hash(tokens: Sequence[int]) -> str:
    """16 hexadecimal digits that tell one output from another."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=8).hexdigest()
