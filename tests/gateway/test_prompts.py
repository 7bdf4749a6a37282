"""A prompt that cannot fit into the context is refused before anything is made of it; others never are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.prompts import Longest
from services.gateway.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from services.gateway.tokenizer import Tokenizer
from services.types.errors import ErrorCode, WealdError

Request = ChatRequest | CompletionRequest | TokenizeRequest


def completion(prompt: Any) -> Request:
    return CompletionRequest.model_validate({"model": "m", "prompt": prompt})


def chat(*contents: Any) -> Request:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatRequest.model_validate({"model": "m", "messages": messages})


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.fixture
def longest(write: Callable[..., Path]) -> Longest:
    """A context of four tokens; the longest of the vocabulary is `<|im_start|>`."""
    directory = write(config={"max_position_embeddings": 4, "eos_token_id": 2})
    return Longest.of(directory, Tokenizer.load(directory))


@pytest.mark.parametrize(
    "request_",
    [
        completion("x" * 48),
        completion(["x" * 48] * 3),
        completion([1] * 4),
        completion([[1] * 4] * 3),
        chat("x" * 40, [part("y" * 3), part("z" * 4)]),
        TokenizeRequest(prompt="x" * 48),
        TokenizeRequest(prompt=""),
    ],
)
def test_what_may_fit_passes(request_: Request, longest: Longest) -> None:
    longest.check(request_)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (completion("x" * 49), "49 characters"),
        (completion(["x", "x" * 10_000]), "10000 characters"),
        (completion([1] * 5), "5 tokens"),
        (completion([[1], [1] * 5]), "5 tokens"),
        (chat("x" * 40, [part("y" * 5), part("z" * 4)]), "50 characters"),
        (TokenizeRequest(prompt="x" * 49), "49 characters"),
    ],
)
def test_what_cannot_fit_is_refused_with_its_length_and_the_context(
    request_: Request, says: str, longest: Longest
) -> None:
    with pytest.raises(WealdError, match=f"has {says}; the context of 4 tokens holds") as refused:
        longest.check(request_)
    assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_no_text_that_fits_is_ever_refused(text: str, tokenizer: Tokenizer) -> None:
    tokens = len(tokenizer.encode(text, special=False))
    bound = Longest(tokens, tokens * tokenizer.longest)
    if tokenizer.decode(tokenizer.encode(text, special=False)) == text:
        bound.check(completion(text))


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": "many"}, {"text_config": 5}])
def test_settings_that_tell_no_context_length_are_refused(
    config: dict[str, Any], write: Callable[..., Path]
) -> None:
    directory = write(config=config | {"eos_token_id": 2})
    with pytest.raises(WealdError, match="tells no context length") as refused:
        Longest.of(directory, Tokenizer.load(directory))
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT


def test_the_context_of_a_model_of_several_kinds_is_that_of_its_text(write: Callable[..., Path]) -> None:
    directory = write(config={"text_config": {"max_position_embeddings": 7}, "eos_token_id": 2})
    assert Longest.of(directory, Tokenizer.load(directory)).tokens == 7
