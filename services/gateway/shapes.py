"""Answers in OpenAI's shapes, in chunks and as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.gateway.choices import Piece, chat_logprobs, completion_logprobs, weald_object
from services.gateway.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    Usage,
)

Chunk = ChatCompletionChunk | Completion
Whole = ChatCompletion | Completion


class Shape(Protocol):
    """How an answer looks."""

    def opening(self, index: int) -> Chunk | None:
        """The chunk before all others of a choice, if it has one."""

    def chunk(self, index: int, piece: Piece) -> Chunk:
        """The chunk of one piece."""

    def closing(self) -> Chunk:
        """A chunk behind all choices, for the usage."""

    def whole(self, texts: Sequence[Piece], usage: Usage) -> Whole:
        """All choices at once, each as one piece."""


def shape_of(request: ChatRequest | CompletionRequest, id: str, created: int) -> Shape:
    """The shape of the answer to a request, begun at a Unix time in seconds."""
    named = {"id": id, "created": created, "model": request.model}
    if isinstance(request, ChatRequest):
        return _Chat(named, bool(request.logprobs), bool(request.weald))
    # A text with 0 alternatives tells the logprob of each token all the same.
    return _Text(named, request.logprobs is not None, bool(request.weald))


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    text = "".join(piece.text for piece in pieces)
    return replace(pieces[-1], text=text, tokens=tuple(token for piece in pieces for token in piece.tokens))


@dataclass(frozen=True, slots=True)
class _Chat:
    named: dict[str, Any]
    logprobs: bool
    weald: bool

    def opening(self, index: int) -> ChatCompletionChunk:
        delta = Delta(role="assistant", content="")
        return self._chunk([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def chunk(self, index: int, piece: Piece) -> ChatCompletionChunk:
        delta = Delta(content=piece.text)
        return self._chunk([ChunkChoice(index=index, delta=delta, **self._told(piece), **_round(piece))])

    def closing(self) -> ChatCompletionChunk:
        return self._chunk([])

    def whole(self, texts: Sequence[Piece], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(role="assistant", content=text.text, refusal=None),
                **self._told(text),
            )
            for index, text in enumerate(texts)
        ]
        return ChatCompletion(object="chat.completion", choices=choices, usage=usage, **self.named)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self.named)

    def _told(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(piece.tokens) if self.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish} | _weald(piece, self.weald)


@dataclass(frozen=True, slots=True)
class _Text:
    named: dict[str, Any]
    logprobs: bool
    weald: bool

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, piece: Piece) -> Completion:
        return self._of([self._choice(index, piece, **_round(piece))])

    def closing(self) -> Completion:
        return self._of([])

    def whole(self, texts: Sequence[Piece], usage: Usage) -> Completion:
        answer = self._of([self._choice(index, text) for index, text in enumerate(texts)])
        answer.usage = usage
        return answer

    def _choice(self, index: int, piece: Piece, **more: Any) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=completion_logprobs(piece.tokens) if self.logprobs else None,
            finish_reason=piece.finish,
            **_weald(piece, self.weald),
            **more,
        )

    def _of(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self.named)


def _round(piece: Piece) -> dict[str, Any]:
    return {"weald_round": piece.round} if piece.round else {}


def _weald(piece: Piece, told: bool) -> dict[str, Any]:
    return {"weald": weald_object(piece.figures)} if told and piece.finish else {}
