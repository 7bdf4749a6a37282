import math
from typing import Any

import pytest

from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must not be negative, got -1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be in [0, max_tokens=3], got 4"),
        ({"min_tokens": -1}, "min_tokens must be in [0, max_tokens=16], got -1"),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or a finite number from 1e-05 on, got -0.1"),
        (
            {"temperature": math.inf},
            "temperature must be 0 (greedy) or a finite number from 1e-05 on, got inf",
        ),
        (
            {"temperature": math.nan},
            "temperature must be 0 (greedy) or a finite number from 1e-05 on, got nan",
        ),
        ({"top_k": -1}, "top_k must be 0 (all tokens) or more, got -1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1"),
        ({"top_p": math.nan}, "top_p must be in (0, 1], got nan"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], got -2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be in [-2, 2], got nan"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in [0.01, 100], got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be in [0.01, 100], got inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1; token ids start at 0"),
        (
            {"logit_bias": {3: math.inf}},
            "logit_bias of token 3 must be in [-100, 100], or -inf to ban it, got inf",
        ),
        ({"temperature": 1e-6}, "temperature must be 0 (greedy) or a finite number from 1e-05 on, got 1e-06"),
        (
            {"logit_bias": {3: 1e39}},
            "logit_bias of token 3 must be in [-100, 100], or -inf to ban it, got 1e+39",
        ),
        ({"stop_token_ids": (4, -1)}, "stop_token_ids names token -1; token ids start at 0"),
        ({"logprobs": -1}, "logprobs must be in [0, 20], got -1"),
        ({"logprobs": 21}, "logprobs must be in [0, 20], got 21"),
        ({"json_schema": " " * 65537}, "json_schema has 65537 characters; shorten it to 65536"),
        (
            {"json_schema": "{}", "ignore_eos": True},
            "json_schema and ignore_eos exclude each other: a document ends where it is complete; "
            "leave one of them out",
        ),
        (
            {"logit_bias": {3: math.nan}},
            "logit_bias of token 3 must be in [-100, 100], or -inf to ban it, got nan",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(WealdError) as raised:
        SamplingParams(**values)
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 0, "min_tokens": 0},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"top_k": 1, "top_p": 1.0, "min_p": 1.0},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 0.5},
        {"logit_bias": {0: -math.inf, 1: 100.0}},
        {"seed": -(2**70)},
        {"logprobs": 0},
        {"logprobs": 20, "json_schema": " " * 65536},
    ],
)
def test_the_bounds_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "penalised"),
    [
        ({"temperature": 0.0, "min_tokens": 2, "logit_bias": {0: 1.0}}, False),
        ({"frequency_penalty": -0.5}, True),
        ({"presence_penalty": 0.5}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_only_penalties_make_the_tokens_seen_matter(values: dict[str, Any], penalised: bool) -> None:
    assert SamplingParams(**values).penalised is penalised
