"""Where a client lost its stream, and what it lacks of the same answer."""

import hashlib
import re
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Self

from services.gateway.choices import Piece
from services.gateway.errors import HttpError
from services.types.errors import ErrorCode, invalid

DIGEST = 8
"""Bytes of a hash that tells one text from another."""
_ID = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{32})((?:/\d{1,10}\.\d{1,10}\.[0-9a-f]{16}\.?)+)")
"""Of a request; then, of each choice, characters, tokens, hash, and a dot behind one that is at its end."""


@dataclass(frozen=True, slots=True)
class Point:
    """How far a client has got in the text of one choice."""

    characters: int = 0
    tokens: int = 0
    """Those of which it has logprobs."""
    digest: str = hashlib.blake2b(digest_size=DIGEST).hexdigest()
    """Of the characters."""
    ended: bool = False
    """Whether it knows how the choice ended."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a point as `str` writes it."""
        characters, tokens, digest, *ended = text.split(".")
        return cls(int(characters), int(tokens), digest, bool(ended))

    def __str__(self) -> str:
        return f"{self.characters}.{self.tokens}.{self.digest}{'.' if self.ended else ''}"


@dataclass(frozen=True, slots=True)
class EventId:
    """Where a stream stands: the id of each of its events."""

    request: str
    """The id of the answer."""
    points: tuple[Point, ...]
    """Of the choices, by index."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an event's id.

        Raises:
            WealdError: `INVALID_ARGUMENT` when it is none.
        """
        if not (match := _ID.fullmatch(text)):
            raise invalid("`Last-Event-ID` is no id of an event; send the last `id` of the stream")
        return cls(match[1], tuple(Point.parse(point) for point in match[2][1:].split("/")))

    def __str__(self) -> str:
        return "/".join([self.request, *map(str, self.points)])


class Delivery:
    """What a client gets of one choice, behind the point where it lost an earlier stream of it."""

    def __init__(self, lost: Point) -> None:
        self._lost = lost
        self._hash = hashlib.blake2b(digest_size=DIGEST)
        self._characters = self._tokens = 0
        self._ended = lost.ended

    @property
    def point(self) -> Point:
        """How far the client is, or was before."""
        if self._characters < self._lost.characters:
            return self._lost
        tokens = max(self._tokens, self._lost.tokens)
        return Point(self._characters, tokens, self._hash.hexdigest(), self._ended)

    def take(self, piece: Piece) -> Piece | None:
        """What is new to the client in the next piece of the choice.

        Raises:
            HttpError: when the text is not the one that the client has.
        """
        lacking = max(self._lost.characters - self._characters, 0)
        known, fresh = piece.text[:lacking], piece.text[lacking:]
        self._add(known)
        if len(known) == lacking:
            if lacking and self._hash.hexdigest() != self._lost.digest:
                raise _diverged(f"its first {self._lost.characters} characters are others")
            self._add(fresh)
        elif piece.finish:
            raise _diverged(f"it ends after {self._characters} characters")
        if fresh and self._lost.ended:
            raise _diverged(f"it goes on after {self._lost.characters} characters")
        tokens = piece.tokens[max(self._lost.tokens - self._tokens, 0) :]
        self._tokens += len(piece.tokens)
        finish = None if self._ended else piece.finish
        self._ended = self._ended or piece.finish is not None
        round = None if lacking else piece.round
        if not (fresh or tokens or finish or round):
            return None
        return replace(piece, text=fresh, tokens=tokens, finish=finish, round=round)

    def _add(self, text: str) -> None:
        self._hash.update(text.encode())
        self._characters += len(text)


def _diverged(what: str) -> HttpError:
    # Of the catalogue's error of this name the services are at fault; here it can be the client's id as well.
    return HttpError(
        HTTPStatus.CONFLICT,
        f"the text is not the one that was delivered: {what}; send the request without `Last-Event-ID`",
        param="Last-Event-ID",
        code=ErrorCode.DIVERGED.value,
    )
