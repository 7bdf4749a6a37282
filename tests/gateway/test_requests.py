"""A request becomes the calls of its choices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.requests import MAX_CALLS, Job, choice_seed, conversation, job_of, new_id
from services.gateway.schemas import ChatRequest, CompletionRequest, Message
from services.gateway.tokenizer import Tokenizer
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams

Write = Callable[..., Path]

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'alien' %}{{ raise_exception('only humans speak here: ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant:"
)
USER = {"role": "user", "content": "Why 🌲?"}
EOS = {"eos_token_id": 7}


@pytest.fixture
def tokenizer(write: Write) -> Tokenizer:
    """A byte-level tokenizer with a chat template."""
    return Tokenizer.load(write(config=EOS, tokenizer_config={"chat_template": TEMPLATE}))


def chat(tokenizer: Tokenizer, id: str = "chatcmpl-1", **fields: Any) -> Job:
    request = ChatRequest.model_validate({"model": "m", "messages": [USER]} | fields)
    return job_of(request, tokenizer, id)


def completion(tokenizer: Tokenizer, prompt: Any = "the", id: str = "cmpl-1", **fields: Any) -> Job:
    request = CompletionRequest.model_validate({"model": "m", "prompt": prompt} | fields)
    return job_of(request, tokenizer, id)


def params(job: Job) -> SamplingParams:
    return job.calls[0].params


def refusal(action: Callable[[], object]) -> WealdError:
    with pytest.raises(WealdError) as raised:
        action()
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    return raised.value


def test_a_chat_is_rendered_by_the_template_of_the_model(tokenizer: Tokenizer) -> None:
    job = chat(tokenizer, messages=[{"role": "system", "content": "Be brief."}, USER])
    text = "<|im_start|>system: Be brief.<|im_end|><|im_start|>user: Why 🌲?<|im_end|><|im_start|>assistant:"
    assert tokenizer.decode(job.calls[0].prompt, skip_special=False) == text
    assert not job.continues
    assert job.calls[0].session == "chatcmpl-1-0"


def test_parts_of_a_message_stand_on_lines_of_their_own() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "a tree"}]
    message = Message.model_validate({"role": "user", "content": parts, "name": "Ann"})
    assert conversation([message]) == [{"role": "user", "content": "Look:\na tree", "name": "Ann"}]


def test_roles_and_names_are_what_the_template_takes(tokenizer: Tokenizer) -> None:
    job = chat(tokenizer, messages=[{"role": "ranger", "content": "Hi", "name": "Ann"}])
    assert "ranger Ann: Hi" in tokenizer.decode(job.calls[0].prompt, skip_special=False)


def test_what_the_template_says_of_an_error_is_told(tokenizer: Tokenizer) -> None:
    error = refusal(lambda: chat(tokenizer, messages=[{"role": "alien", "content": "Hi"}]))
    assert "only humans speak here: alien" in error.message


def test_a_model_without_a_template_refuses_chats_and_takes_prompts(write: Write) -> None:
    plain = Tokenizer.load(write(config=EOS))
    assert "no chat template" in refusal(lambda: chat(plain)).message
    assert completion(plain).calls


def test_a_template_that_makes_nothing_of_the_messages_is_an_error(write: Write) -> None:
    silent = Tokenizer.load(write(config=EOS, tokenizer_config={"chat_template": "{# nothing #}"}))
    assert "`messages`" in refusal(lambda: chat(silent)).message


def test_prompts_are_texts_or_tokens_one_or_several(tokenizer: Tokenizer) -> None:
    the, of = tuple(tokenizer.encode("the")), tuple(tokenizer.encode("of"))
    for prompt, expected in (
        ("the", [the]),
        (["the"], [the]),
        (["the", "of"], [the, of]),
        ([5, 6], [(5, 6)]),
        ([0], [(0,)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ):
        job = completion(tokenizer, prompt)
        assert [call.prompt for call in job.calls] == expected
        assert job.continues
    assert the[0] in tokenizer.special_ids, "what the model expects around a text is added"


def test_a_text_without_tokens_is_refused(write: Write) -> None:
    directory = write(config=EOS)
    path = directory / "tokenizer.json"
    core = json.loads(path.read_text())
    core["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    core["post_processor"] = None
    path.write_text(json.dumps(core))
    assert "`prompt`" in refusal(lambda: completion(Tokenizer.load(directory), "  ")).message


def test_choices_of_a_prompt_stand_together_and_number_through(tokenizer: Tokenizer) -> None:
    job = completion(tokenizer, [[5], [6]], n=2, seed=3)
    assert [(call.session, call.prompt) for call in job.calls] == [
        ("cmpl-1-0", (5,)),
        ("cmpl-1-1", (5,)),
        ("cmpl-1-2", (6,)),
        ("cmpl-1-3", (6,)),
    ]
    seeds = [call.params.seed for call in job.calls]
    assert seeds == [3, choice_seed(3, 1)] * 2
    assert job.n == 2


def test_choices_draw_with_seeds_that_follow_from_that_of_the_request(tokenizer: Tokenizer) -> None:
    def seeds(**fields: Any) -> list[int | None]:
        return [call.params.seed for call in chat(tokenizer, **fields).calls]

    sixteen = seeds(n=16, seed=7)
    assert sixteen == seeds(n=16, seed=7), "reproducible"
    assert sixteen[:4] == seeds(n=4, seed=7)
    assert sixteen[:1] == seeds(seed=7) == [7], "the first is the one without others"
    assert len({*sixteen, *seeds(n=16, seed=8)}) == 32
    assert all(seed is not None and 0 <= seed < 2**64 for seed in sixteen)
    assert seeds(n=3, seed=-1) == seeds(n=3, seed=2**64 - 1)
    # As long as this holds, a stream that was lost across an upgrade goes on with the same text.
    assert sixteen[1] == 16966735830609695309


def test_a_request_without_a_seed_has_one_by_its_id(tokenizer: Tokenizer) -> None:
    def seeds(id: str) -> list[int | None]:
        return [call.params.seed for call in chat(tokenizer, id, n=2).calls]

    assert seeds("chatcmpl-1") == seeds("chatcmpl-1")
    assert len({*seeds("chatcmpl-1"), *seeds("chatcmpl-2")}) == 4


def test_ids_are_random_and_name_the_kind_of_request() -> None:
    a_chat = ChatRequest.model_validate({"model": "m", "messages": [USER]})
    a_completion = CompletionRequest.model_validate({"model": "m", "prompt": "a"})
    ids = {new_id(a_chat) for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("chatcmpl-") and len(id) == len("chatcmpl-") + 32 for id in ids)
    assert new_id(a_completion).startswith("cmpl-")


def test_too_many_texts_at_once_are_refused(tokenizer: Tokenizer) -> None:
    assert len(completion(tokenizer, [[5]] * (MAX_CALLS // 16), n=16).calls) == MAX_CALLS
    error = refusal(lambda: completion(tokenizer, [[5]] * (MAX_CALLS // 16 + 1), n=16))
    assert "`n` of 16 for 9 prompts" in error.message


def test_what_is_not_said_is_as_openai_has_it(tokenizer: Tokenizer) -> None:
    seed = params(completion(tokenizer)).seed
    assert params(completion(tokenizer)) == SamplingParams(seed=seed, max_tokens=16)
    nulls = {name: None for name in CompletionRequest.model_fields if name not in {"model", "prompt"}}
    assert params(completion(tokenizer, **nulls)) == params(completion(tokenizer))
    endless = params(chat(tokenizer))
    assert endless.max_tokens == 2**31 - 1, "as far as the context goes"
    call = chat(tokenizer).calls[0]
    assert call.speculative
    assert not call.want_trees
    assert call.draft is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"frequency_penalty": -2}, {"frequency_penalty": -2}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"5": -100, "07": 1.5}}, {"logit_bias": {5: -100, 7: 1.5}}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"response_format": {"type": "text"}}, {"json_schema": None}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
    ],
)
def test_parameters_are_passed_on(
    tokenizer: Tokenizer, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    for given in (params(chat(tokenizer, **fields)), params(completion(tokenizer, **fields))):
        assert {name: getattr(given, name) for name in expected} == expected


def test_a_chat_can_name_its_length_in_two_ways(tokenizer: Tokenizer) -> None:
    assert params(chat(tokenizer, max_completion_tokens=5)).max_tokens == 5
    assert params(chat(tokenizer, max_completion_tokens=5, max_tokens=5)).max_tokens == 5
    assert params(chat(tokenizer, max_completion_tokens=0)).max_tokens == 0


def test_logprobs_are_asked_for_as_each_api_does(tokenizer: Tokenizer) -> None:
    assert params(chat(tokenizer)).logprobs is None
    assert params(chat(tokenizer, logprobs=False)).logprobs is None
    assert params(chat(tokenizer, logprobs=True)).logprobs == 0
    assert params(chat(tokenizer, logprobs=True, top_logprobs=20)).logprobs == 20
    assert params(completion(tokenizer)).logprobs is None
    assert params(completion(tokenizer, logprobs=0)).logprobs == 0
    assert params(completion(tokenizer, logprobs=5)).logprobs == 5


def schema_of(tokenizer: Tokenizer, schema: dict[str, Any]) -> str | None:
    form = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema, "strict": True}}
    return params(chat(tokenizer, response_format=form)).json_schema


def test_a_json_schema_is_passed_on_as_it_is(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"木": {"const": "\\u00e9\n"}}, "required": ["木"]}
    assert json.loads(schema_of(tokenizer, schema) or "") == schema
    assert list(json.loads(schema_of(tokenizer, {"b": 1, "a": 2}) or "")) == ["b", "a"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "schema", [{"const": "\ud83c"}, {"\ud83c": 1}, {"minimum": float("nan")}, nested(100_000)]
)
def test_a_schema_that_has_no_form_as_json_is_refused(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    assert "schema" in refusal(lambda: schema_of(tokenizer, schema)).message


def test_stop_strings_are_one_or_several(tokenizer: Tokenizer) -> None:
    assert chat(tokenizer).stops == ()
    assert chat(tokenizer, stop="ab").stops == ("ab",)
    assert chat(tokenizer, stop=["ab", "c"]).stops == ("ab", "c")
    assert not chat(tokenizer).include_stop
    assert chat(tokenizer, include_stop_str_in_output=True).include_stop


def test_speculation_can_be_left_out(tokenizer: Tokenizer) -> None:
    assert chat(tokenizer, speculative=True).calls[0].speculative
    assert not chat(tokenizer, speculative=False).calls[0].speculative


def test_parameters_that_exclude_each_other_are_refused_in_a_sentence(tokenizer: Tokenizer) -> None:
    assert "min_tokens" in refusal(lambda: completion(tokenizer, min_tokens=17)).message
    assert "temperature" in refusal(lambda: completion(tokenizer, temperature=1e-9)).message


def test_the_trace_context_travels_with_every_call(tokenizer: Tokenizer) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "the", "n": 2})
    job = job_of(request, tokenizer, "cmpl-1", "00-1-2-01")
    assert [call.traceparent for call in job.calls] == ["00-1-2-01"] * 2
