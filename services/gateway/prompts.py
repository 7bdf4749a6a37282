"""Prompts that are longer than the context, told by their length alone: to encode megabytes takes seconds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.gateway.requests import conversation
from services.gateway.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from services.gateway.tokenizer import Tokenizer
from services.types.errors import ErrorCode, WealdError, incompatible


@dataclass(frozen=True, slots=True)
class Longest:
    """What fits into the context at best."""

    tokens: int
    characters: int
    """If each token were the vocabulary's longest."""

    @classmethod
    def of(cls, directory: Path, tokenizer: Tokenizer) -> Self:
        """By the target's settings.

        Raises:
            WealdError: `INCOMPATIBLE_CHECKPOINT` when these do not tell.
        """
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            tokens = int(config.get("text_config", config)["max_position_embeddings"])
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise incompatible(f"{directory}/config.json tells no context length: {error!r}") from error
        return cls(tokens, tokens * tokenizer.longest)

    def check(self, request: ChatRequest | CompletionRequest | TokenizeRequest) -> None:
        """Raises `WealdError(CONTEXT_LENGTH_EXCEEDED)` when a prompt cannot fit, whatever its tokens are."""
        for prompt in _prompts(request):
            of_text = isinstance(prompt, str)
            most = self.characters if of_text else self.tokens
            if len(prompt) > most:
                unit = "characters" if of_text else "tokens"
                raise WealdError(
                    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                    f"a prompt has {len(prompt)} {unit}; the context of {self.tokens} tokens holds {most} at "
                    "most; shorten it",
                )


def _prompts(request: ChatRequest | CompletionRequest | TokenizeRequest) -> Sequence[str | list[int]]:
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if isinstance(request, TokenizeRequest) and request.prompt is not None:
        return [request.prompt]
    return ["".join(message["content"] for message in conversation(request.messages or ()))]
