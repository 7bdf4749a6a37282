"""What goes over HTTP: requests and responses in the shapes of the OpenAI API, vLLM's names for the rest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from services.types.sampling import MAX_LOGPROBS
from services.types.session import FinishReason

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 16
"""`n` at most."""
MAX_PROMPTS = 128
"""Prompts of one request at most."""
MAX_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_TOKEN = 2**31 - 1
"""The largest number that names a token, or counts tokens."""
_REFUSED = "refused"
"""Type of the errors whose text is a whole sentence."""


def _fault(sentence: str, field: str | None = None) -> PydanticCustomError:
    """An error of the field it is raised for, or of `field`."""
    # A sentence of its own, with braces in it, would be taken for a template.
    return PydanticCustomError(_REFUSED, "{sentence}", {"sentence": sentence, "field": field})


def _whole(text: str) -> str:
    """Text that has a UTF-8 form."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _fault("the text contains half a surrogate pair; send valid Unicode") from None
    return text


def _shown(name: str) -> str:
    return json.dumps(name[:40])


@dataclass(frozen=True)
class _NotYet:
    """A field of the API that is refused by its name, but for null and values that ask for nothing."""

    neutral: tuple[object, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.neutral, None]} if self.neutral else {"type": "null"}

    def _check(self, value: object, info: ValidationInfo) -> None:
        # By type, too: 1 is not true here, nor 0 false.
        if value is None or any(value == one and type(value) is type(one) for one in self.neutral):
            return
        raise _fault(f"`{info.field_name}` is not supported yet; leave it out")


Text = Annotated[str, AfterValidator(_whole)]
"""Valid Unicode."""
Prompt = Annotated[str, Field(min_length=1), AfterValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), AfterValidator(_whole)]
Refused = Annotated[None, _NotYet()]
Unused = Annotated[Any, Field(description="Accepted; it changes nothing.")]


class _Request(BaseModel):
    """Strict: no field is ignored, no "5" is taken for 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Response(BaseModel):
    """Fields that were not set stay away from the JSON (`exclude_unset`)."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# Requests.


class StreamOptions(_Request):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    """A last chunk without choices that has the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: usage so far in every chunk (vLLM)."""
    include_obfuscation: Unused = None


class TextFormat(_Request):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(_Request):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Request):
    """A JSON schema, and what it is called."""

    name: Text
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """The answer follows the schema in any case."""


class JsonSchemaFormat(_Request):
    """The answer follows a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _known_format(value: object) -> object:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and f"<{kind}>" != _format_kind(value):
        raise _fault(f"`response_format` is text, json_object or json_schema, not {_shown(kind)}")
    return value


def _format_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else "<text>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(_format_kind),
    BeforeValidator(_known_format),
]


def _stop_kind(value: object) -> str:
    return "<texts>" if isinstance(value, list) else "<text>"


def _bias_token(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and int(key[:11]) <= MAX_TOKEN and len(key) <= 11):
        raise _fault("a key of `logit_bias` must be a token id, like 42", "logit_bias")
    return key


class _Sampling(_Request):
    """What both ways to ask for text share."""

    model: Text
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("<text>")]
            | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("<texts>")],
            Discriminator(_stop_kind),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, AfterValidator(_bias_token)],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | None = None
    """False: plain steps, the same text."""
    speculative_coupling: bool | None = None
    """Whether candidates are ranked by the noise of the draws; None: as draft replicas have it. The text is
    the same.
    """
    priority: Literal["latency", "throughput", 0] | None = None
    """What counts where requests compete for the target's time, 0 and None: neither; the text is the same."""
    weald: bool | None = None
    """Whether the answer tells what its rounds did."""
    weald_rounds: bool | None = None
    """Whether each chunk of a stream tells of the round that brought it, and draws its tree."""

    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None

    prompt_logprobs: Refused = None
    best_of: Annotated[None, _NotYet((1,))] = None
    use_beam_search: Annotated[None, _NotYet((False,))] = None
    length_penalty: Annotated[
        None,
        _NotYet(
            (
                1,
                1.0,
            )
        ),
    ] = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    structured_outputs: Refused = None
    skip_special_tokens: Annotated[None, _NotYet((True,))] = None
    spaces_between_special_tokens: Annotated[None, _NotYet((True,))] = None
    allowed_token_ids: Refused = None
    bad_words: Annotated[None, _NotYet(([],))] = None
    truncate_prompt_tokens: Refused = None
    return_token_ids: Annotated[None, _NotYet((False,))] = None
    return_tokens_as_token_ids: Annotated[None, _NotYet((False,))] = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        for field in ("stream_options", "weald_rounds"):
            if getattr(self, field) and not self.stream:
                raise _fault(f"`{field}` is for streams; set `stream`, or leave it out", field)
        return self


class TextPart(_Request):
    """A part of a message."""

    type: Literal["text"]
    text: Text


def _part(value: object) -> object:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise _fault(f"a part of type {_shown(kind)} is not supported yet; send parts of type text")
    return value


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


class Message(_Request):
    """One message of a conversation, as the model's chat template takes it."""

    role: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_whole)]
    content: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[list[Annotated[TextPart, BeforeValidator(_part)]], Field(min_length=1), Tag("<parts>")],
        Discriminator(_content_kind),
    ]
    name: Text | None = None

    tool_calls: Annotated[None, _NotYet(([],))] = None
    tool_call_id: Refused = None
    function_call: Refused = None
    audio: Refused = None
    refusal: Refused = None
    # What the answer of another server brings along.
    annotations: Unused = None
    reasoning_content: Refused = None


class ChatRequest(_Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    parallel_tool_calls: Unused = None

    tools: Annotated[None, _NotYet(([],))] = None
    tool_choice: Annotated[None, _NotYet(("none",))] = None
    functions: Annotated[None, _NotYet(([],))] = None
    function_call: Annotated[None, _NotYet(("none",))] = None
    audio: Refused = None
    modalities: Annotated[None, _NotYet((["text"],))] = None
    prediction: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None
    echo: Annotated[None, _NotYet((False,))] = None
    add_generation_prompt: Annotated[None, _NotYet((True,))] = None
    continue_final_message: Annotated[None, _NotYet((False,))] = None
    add_special_tokens: Annotated[None, _NotYet((False,))] = None
    chat_template: Refused = None
    chat_template_kwargs: Annotated[None, _NotYet(({},))] = None
    documents: Annotated[None, _NotYet(([],))] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _fault("`top_logprobs` needs `logprobs`; set it to true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _fault("`max_tokens` and `max_completion_tokens` differ; send one of them", "max_tokens")
        return self


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return "<token_lists>" if isinstance(first, list) else "<texts>" if isinstance(first, str) else "<tokens>"


class CompletionRequest(_Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Annotated[Prompt, Tag("<text>")]
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
        | Annotated[Tokens, Tag("<tokens>")]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<token_lists>")],
        Discriminator(_prompt_kind),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    echo: Annotated[None, _NotYet((False,))] = None
    suffix: Annotated[None, _NotYet(("",))] = None
    prompt_embeds: Refused = None
    add_special_tokens: Annotated[None, _NotYet((True,))] = None


class TokenizeRequest(_Request):
    """`POST /tokenize`: a text, or a conversation by the model's chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Of a text: whether to add the tokens that the model expects around it; absent: true."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _fault("send `prompt` or `messages`, one of them", "prompt")
        if self.messages is not None and self.add_special_tokens is not None:
            raise _fault(
                "`add_special_tokens` is for a `prompt`: the chat template adds its own", "add_special_tokens"
            )
        return self


class DetokenizeRequest(_Request):
    """`POST /detokenize`."""

    model: Text | None = None
    tokens: list[TokenId]


def complaint(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Of what pydantic says about a request: the field at fault, like `messages[0].content`, and a sentence.

    Args:
        errors: as `ValidationError.errors` gives them, or FastAPI's, which stand below `body`; at least one.
    """
    error = errors[0]
    field = error.get("ctx", {}).get("field") or _path(error["loc"])
    sentence = error["msg"]
    if error["type"] == "extra_forbidden":
        sentence = f"`{field}` is no field that this server knows; leave it out"
    elif error["type"] != _REFUSED:
        place = f"`{field}`" if field else "the body"
        sentence = f"{place}: {sentence[0].lower()}{sentence[1:]}"
    return field, sentence


def _path(loc: Sequence[int | str]) -> str | None:
    path = ""
    for step in loc[loc[:1] == ("body",) :]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (step.startswith("<") and step.endswith(">")):
            # What stands in angle brackets is a branch of a union.
            path += f".{step}" if path else step
    return path or None


# Responses.


class CachedTokens(_Response):
    """Details of a prompt's tokens."""

    cached_tokens: int


class PredictedTokens(_Response):
    """Details of a completion's tokens."""

    accepted_prediction_tokens: int
    """Draft tokens that became part of the completion."""
    rejected_prediction_tokens: int
    """Draft tokens that were verified and did not."""


class Usage(_Response):
    """Tokens of one request, over all its choices; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens


class WealdObject(_Response):
    """What the rounds of one choice did."""

    seed: int
    """In use; named in a request, it gives this choice as its first."""
    rounds: int
    """Target steps after the prefill."""
    tau: float | None
    """Tokens committed per round that had a tree, bonus included; null without one."""
    draft_tokens: int
    """Draft nodes that were verified."""
    accepted_per_position: list[int]
    """Rounds whose accepted path has a token at this depth, from the first depth on."""
    draft_rounds: int
    """Rounds that verified a tree: what `accepted_per_position` is to be divided by."""
    verifier: str
    """host:port of the verify replica that served it last."""
    moves: int
    """How often the session went on at another replica."""


class ReplicaObject(_Response):
    """A draft replica."""

    address: str
    running: int | None
    """Sessions that it drafts for; null: it does not answer."""
    verifiers: dict[str, bool]
    """Whether a verify replica is connected and serves the same target, by host:port."""


class ReplicaList(_Response):
    """`GET /replicas`."""

    object: Literal["list"]
    data: list[ReplicaObject]


class ScrapeTargets(_Response):
    """What Prometheus is to scrape."""

    targets: list[str]
    """host:port"""
    labels: dict[str, str]


class NodeObject(_Response):
    """A node of a draft tree."""

    text: str
    parent: int
    """Index of its parent, smaller than its own; -1 of the root."""
    confidence: float
    value: float
    verified: bool
    """Whether it stood in the target step; otherwise it was cut."""
    accepted: bool


class RoundObject(_Response):
    """One round: what it committed, and the tree that it verified."""

    tokens: list[str]
    """Committed; the first `accepted` of them from the tree."""
    accepted: int
    drafted: int
    """Nodes of the tree proposed, root included; 0 for a plain step."""
    verified: int
    """Nodes that stood in the target step, root included."""
    draft_ms: float
    """Of drafting; 0 for a plain step."""
    verify_ms: float
    """From the sending of the tree, or from the last reply, to this one."""
    nodes: list[NodeObject]


class TopLogprob(_Response):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(_Response):
    """One token of a chat's answer."""

    token: str
    logprob: float | None
    """Null where a lost replica took it along."""
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    """One entry per token of the text, in order."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(_Response):
    """Four parallel lists, one entry per token of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnswerMessage(_Response):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(_Response):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    weald: WealdObject | None = None


class ChatCompletion(_Response):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None


class Delta(_Response):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(_Response):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    weald: WealdObject | None = None
    weald_round: RoundObject | None = None


class ChatCompletionChunk(_Response):
    """A piece of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None


class CompletionChoice(_Response):
    """One text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    weald: WealdObject | None = None
    weald_round: RoundObject | None = None


class Completion(_Response):
    """The answer to a prompt, or a piece of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ServedModel(_Response):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Response):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class Tokenized(_Response):
    """What a text or a conversation is made of."""

    count: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(_Response):
    """The text of tokens."""

    prompt: str


class ErrorObject(_Response):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Response):
    """The body of every answer that is an error."""

    error: ErrorObject
