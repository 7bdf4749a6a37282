"""From a request over HTTP to the calls that answer it."""

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.gateway.schemas import (
    MAX_TOKEN,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
)
from services.gateway.tokenizer import Tokenizer
from services.types.configuration import Priority
from services.types.errors import invalid
from services.types.messages import Call
from services.types.sampling import SEED_BITS, SamplingParams

MAX_CALLS = 128
"""Of one request: choices over all its prompts."""
SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
)
"""Fields of a request that are sampling parameters as they stand."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the sessions that answer it, and how their tokens become its text."""

    id: str
    calls: tuple[Call, ...]
    """Choice i of prompt p stands at p * n + i, which is its index in the answer."""
    n: int
    """Choices of each prompt."""
    tokenizer: Tokenizer
    continues: bool
    """Whether the text goes on where the prompt ends; a chat's answer is a text of its own."""
    stops: tuple[str, ...]
    include_stop: bool
    """Whether the stop string found is part of the text."""


def kind_of(request: ChatRequest | CompletionRequest) -> str:
    """What the names of such requests begin with."""
    return "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"


def new_id(request: ChatRequest | CompletionRequest) -> str:
    """A random name for a request, which its sessions and its seed come from."""
    return f"{kind_of(request)}-{secrets.token_hex(16)}"


def job_of(
    request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, id: str, traceparent: str = ""
) -> Job:
    """What a request asks for. Long prompts take their time: seconds for megabytes.

    Args:
        request: as it came.
        tokenizer: of the target.
        id: from `new_id`; the same id and request are the same sessions, with the same seeds.
        traceparent: W3C trace context that the calls carry.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the request can never be answered.
    """
    n = request.n or 1
    prompts = list(_prompts(request, tokenizer))
    if n * len(prompts) > MAX_CALLS:
        raise invalid(
            f"`n` of {n} for {len(prompts)} prompts are {n * len(prompts)} texts; ask for at most "
            f"{MAX_CALLS} at once"
        )
    params = _params(request)
    seed = _seed_of(id) if request.seed is None else request.seed
    calls = [
        Call(
            session=f"{id}-{prompt * n + choice}",
            prompt=tokens,
            output=(),
            params=replace(params, seed=choice_seed(seed, choice)),
            speculative=request.speculative is not False,
            traceparent=traceparent,
            priority=Priority(request.priority or Priority.NORMAL),
            coupled=request.speculative_coupling,
            want_trees=bool(request.weald_rounds),
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(n)
    ]
    stop = request.stop or ()
    return Job(
        id=id,
        calls=tuple(calls),
        n=n,
        tokenizer=tokenizer,
        continues=isinstance(request, CompletionRequest),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice of a prompt: that of the request for the first, one derived from it for others."""
    seed %= 1 << SEED_BITS
    return _digest(f"{seed}:{choice}") if choice else seed


def conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a chat template takes them; the parts of one stand on lines of their own."""
    return [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "\n".join(part.text for part in message.content),
        }
        | ({} if message.name is None else {"name": message.name})
        for message in messages
    ]


def _prompts(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Token ids of each prompt."""
    if isinstance(request, ChatRequest):
        tokens = tuple(tokenizer.chat(conversation(request.messages)))
        if not tokens:
            raise invalid("the model's chat template makes no prompt of `messages`; send others")
        yield tokens
        return
    for prompt in _several(request.prompt):
        tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not tokens:
            raise invalid("`prompt` has no tokens; give some text")
        yield tokens


def _several(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Each prompt of a field that can also be a single one."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if isinstance(one, str)]
    lists = [one for one in prompt if isinstance(one, list)]
    return texts or lists or [[one for one in prompt if isinstance(one, int)]]


def _params(request: ChatRequest | CompletionRequest) -> SamplingParams:
    """The sampling parameters of a request, without its seed."""
    limit, logprobs = request.max_tokens, request.logprobs
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens if limit is None else limit
        # As far as the context goes: the verifier knows where that is.
        limit = MAX_TOKEN if limit is None else limit
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **given | ({} if limit is None else {"max_tokens": limit}),
        top_k=max(request.top_k or 0, 0),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        json_schema=_json_schema(request),
    )


def _json_schema(request: ChatRequest | CompletionRequest) -> str | None:
    """The JSON schema that the answer follows, as JSON."""
    match request.response_format:
        case JsonObjectFormat():
            return '{"type":"object"}'
        case JsonSchemaFormat(json_schema=named):
            try:
                schema = json.dumps(named.schema_, ensure_ascii=False, allow_nan=False)
                schema.encode()
            except (ValueError, RecursionError) as error:
                raise invalid(f"`response_format.json_schema.schema` is no JSON schema: {error}") from error
            return schema
    return None


def _seed_of(id: str) -> int:
    """The seed of a request that names none: random, as its id is, and the same when it is resumed."""
    return _digest(f"seed:{id}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SEED_BITS // 8).digest(), "little")
