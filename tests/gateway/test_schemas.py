"""What clients may send, and how they are told what they may not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from services.gateway.schemas import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    AnswerMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    complaint,
)

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "m", "messages": [USER]}
COMPLETION = {"model": "m", "prompt": "Hi"}
BOTH = [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)]
both = pytest.mark.parametrize(("kind", "base"), BOTH)

HALF = "\ud83c"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HALF),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just(HALF), inner, max_size=4),
    max_leaves=12,
)


def refusal(kind: type[BaseModel], body: Any) -> tuple[str | None, str]:
    """The field at fault and the sentence."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    return complaint(raised.value.errors())


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(CHAT | fields)


@both
def test_the_smallest_request_is_accepted(kind: type[BaseModel], base: dict[str, Any]) -> None:
    assert kind.model_validate(base).model_dump(exclude_unset=True) == base


@both
def test_what_may_be_left_out_may_be_null(kind: type[BaseModel], base: dict[str, Any]) -> None:
    nulls = {name: None for name in kind.model_fields if name not in base}
    assert kind.model_validate(base | nulls).model_dump(exclude_none=True) == base


@both
@pytest.mark.parametrize("name", ["foo", "max_token", "Temperature", "", "a b", HALF])
def test_an_unknown_field_is_refused_by_its_name(
    kind: type[BaseModel], base: dict[str, Any], name: str
) -> None:
    field, sentence = refusal(kind, base | {name: 1})
    if name != HALF:
        assert name in (field or "")
        assert f"`{name or None}`" in sentence


UNSUPPORTED = {
    ChatRequest: {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "functions": [{"name": "f"}],
        "function_call": "auto",
        "echo": True,
        "prompt_logprobs": 1,
        "best_of": 2,
        "audio": {"voice": "alloy"},
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "Hi"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "web_search_options": {},
        "guided_json": {},
        "add_generation_prompt": False,
        "chat_template": "{{ messages }}",
    },
    CompletionRequest: {
        "echo": True,
        "suffix": "end",
        "best_of": 3,
        "prompt_logprobs": 0,
        "use_beam_search": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [5],
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, fields in UNSUPPORTED.items() for name, value in fields.items()],
)
def test_what_is_not_supported_yet_is_refused_by_its_name(
    kind: type[BaseModel], name: str, value: object
) -> None:
    base = CHAT if kind is ChatRequest else COMPLETION
    expected = (name, f"`{name}` is not supported yet; leave it out")
    assert refusal(kind, base | {name: value}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"echo": False},
        {"best_of": 1},
        {"modalities": ["text"]},
        {"chat_template_kwargs": {}},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize("fields", [{"echo": 0}, {"best_of": True}, {"modalities": "text"}])
def test_values_of_another_type_are_not_taken_for_them(fields: dict[str, Any]) -> None:
    assert refusal(ChatRequest, CHAT | fields)[0] in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"metadata": {"a": "b"}},
        {"service_tier": "auto"},
        {"user": "me"},
        {"parallel_tool_calls": False},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "x"},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stop": [HALF]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(MAX_BIASES + 1)}}, "logit_bias"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [USER, "Hi"]}, "messages[1]"),
        ({"model": 5}, "model"),
        ({"model": HALF}, "model"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_and_its_field_named(
    fields: dict[str, Any], field: str
) -> None:
    named, sentence = refusal(ChatRequest, CHAT | fields)
    assert named == field
    assert field in sentence or "half a surrogate pair" in sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "frequency_penalty": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"n": MAX_CHOICES},
        {"stop": ["a" * MAX_STOP_CHARACTERS] * MAX_STOPS},
        {"stop": []},
        {"logit_bias": {"0": -100, str(2**31 - 1): 100}},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {}, "strict": True},
            }
        },
    ],
)
def test_values_at_the_edge_are_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("message", "field", "mention"),
    [
        ({"content": "Hi"}, "messages[0].role", "required"),
        ({"role": "", "content": "Hi"}, "messages[0].role", "at least 1"),
        ({"role": 1, "content": "Hi"}, "messages[0].role", "string"),
        ({"role": "r" * 65, "content": "Hi"}, "messages[0].role", "at most 64"),
        ({"role": "user"}, "messages[0].content", "required"),
        ({"role": "user", "content": None}, "messages[0].content", "string"),
        ({"role": "user", "content": {}}, "messages[0].content", "string"),
        ({"role": "user", "content": []}, "messages[0].content", "at least 1"),
        ({"role": "user", "content": "a" + HALF}, "messages[0].content", "half a surrogate pair"),
        (
            {"role": "user", "content": [{"type": "text", "text": HALF}]},
            "messages[0].content[0].text",
            "half a surrogate pair",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
            },
            "messages[0].content[1]",
            'a part of type "image_url" is not supported yet',
        ),
        (
            {"role": "user", "content": [{"type": "{braces}" + HALF}]},
            "messages[0].content[0]",
            "{braces}",
        ),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[0].content[0].type", "required"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]", "dictionary"),
        ({"role": "user", "content": "a", "foo": 1}, "messages[0].foo", "`messages[0].foo`"),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{}]},
            "messages[0].tool_calls",
            "`tool_calls` is not supported yet",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_named(message: object, field: str, mention: str) -> None:
    named, sentence = refusal(ChatRequest, CHAT | {"messages": [message]})
    assert named == field
    assert mention in sentence


def test_the_message_of_an_answer_can_be_sent_back() -> None:
    answer = AnswerMessage(role="assistant", content="Hi", refusal=None)
    Message.model_validate(answer.model_dump())
    # As the client of OpenAI's own package makes a dictionary of it.
    nothing = ("refusal", "annotations", "audio", "function_call", "tool_calls")
    Message.model_validate({"role": "assistant", "content": "Hi"} | dict.fromkeys(nothing))


@pytest.mark.parametrize("prompt", ["a", ["a"], ["a", "b"], [0], [5, 6], [[5], [6, 7]], ["a"] * MAX_PROMPTS])
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: object) -> None:
    assert CompletionRequest.model_validate(COMPLETION | {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[5], []], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([5, "a"], "prompt[1]"),
        ([5, [6]], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([[1, None]], "prompt[0][1]"),
        ("a" + HALF, "prompt"),
        (["a", HALF], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_other_prompts_are_refused(prompt: object, field: str) -> None:
    assert refusal(CompletionRequest, COMPLETION | {"prompt": prompt})[0] == field


def test_completions_take_a_number_for_logprobs() -> None:
    assert CompletionRequest.model_validate(COMPLETION | {"logprobs": 5}).logprobs == 5
    for value in (True, 21, -1):
        assert refusal(CompletionRequest, COMPLETION | {"logprobs": value})[0] == "logprobs"


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    TokenizeRequest.model_validate({"prompt": ""})
    TokenizeRequest.model_validate({"messages": [USER]})
    for body in ({}, {"prompt": "a", "messages": [USER]}):
        assert refusal(TokenizeRequest, body)[0] == "prompt"
    assert (
        refusal(TokenizeRequest, {"messages": [USER], "add_special_tokens": True})[0] == "add_special_tokens"
    )
    DetokenizeRequest.model_validate({"tokens": []})
    assert refusal(DetokenizeRequest, {"tokens": [-1]})[0] == "tokens[0]"


@both
@pytest.mark.parametrize("body", [None, [], "a", 5])
def test_a_body_that_is_no_object_is_refused(kind: type[BaseModel], base: object, body: object) -> None:
    field, sentence = refusal(kind, body)
    assert field is None
    assert sentence.startswith("the body: ")


def test_a_complaint_does_not_tell_where_the_framework_keeps_the_body() -> None:
    error = {"type": "missing", "loc": ("body", "messages", 0, "role"), "msg": "Field required"}
    assert complaint([error]) == ("messages[0].role", "`messages[0].role`: field required")
    assert complaint([error | {"loc": ("body",)}]) == (None, "the body: field required")


@both
@given(data=st.data())
def test_whatever_comes_is_accepted_or_complained_about(
    kind: type[BaseModel], base: dict[str, Any], data: st.DataObject
) -> None:
    fields = st.dictionaries(
        st.sampled_from(sorted(kind.model_fields)) | st.text(max_size=3), JSON, max_size=3
    )
    body = data.draw(JSON | fields | fields.map(lambda some: base | some))
    try:
        kind.model_validate(body)
        sentence = "accepted"
    except ValidationError as error:
        sentence = complaint(error.errors())[1]
    assert sentence


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_the_document_of_the_api_tells_what_is_accepted(kind: type[BaseModel]) -> None:
    properties = kind.model_json_schema()["properties"]
    assert set(properties) == {field.alias or name for name, field in kind.model_fields.items()}
    assert kind.model_json_schema()["additionalProperties"] is False
    if kind is ChatRequest:
        assert properties["echo"]["enum"] == [False, None]
        assert properties["prediction"]["type"] == "null"
