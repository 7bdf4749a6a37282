"""Where a text ends: exactly at an end token, exactly at its last allowed token."""

from collections.abc import Sequence

from services.types.sampling import SamplingParams
from services.types.session import FinishReason


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end this text."""
    eos = frozenset[int]() if params.ignore_eos else eos_token_ids
    return eos | frozenset(params.stop_token_ids)


def cut(
    tokens: Sequence[int], room: int, ends: frozenset[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The part of `tokens` that belongs to the text, and why it ends there (None: it goes on).

    Args:
        tokens: what a round would commit, at least one token.
        room: output tokens still allowed, at least 1.
        ends: tokens that end the text; the first one is its last token.
    """
    for count, token in enumerate(tokens[:room], 1):
        if token in ends:
            return tuple(tokens[:count]), FinishReason.STOP
    return tuple(tokens[:room]), FinishReason.LENGTH if len(tokens) >= room else None
