"""Text to token ids and back, chat templates included, for one checkpoint."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.types.errors import incompatible, invalid

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that chat templates know by name."""


class Tokenizer:
    """The tokenizer of a checkpoint; `load` makes one."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        eos_token_ids: frozenset[int],
        named_tokens: Mapping[str, str],
        template: Template | None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._named_tokens = named_tokens
        self._template = template
        added = core.get_added_tokens_decoder()
        fallback = (core.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.eos_token_ids = eos_token_ids
        """Tokens that end the text, as the checkpoint's generation settings say."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that `decode` skips."""
        self.byte_ids = frozenset(token_id for token_id in fallback if token_id is not None)
        """Tokens of byte fallback; they become characters only as a whole run."""
        self.vocab_size = core.get_vocab_size()
        """Number of tokens, added ones included; a model's logits may be padded to more."""

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the tokenizer of the checkpoint in `directory`.

        Raises `WealdError(INCOMPATIBLE_CHECKPOINT)` when a file that is needed is missing or malformed.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise incompatible(f"{path} is missing; save the model's fast tokenizer beside its weights")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more specific
            raise incompatible(f"{path} cannot be read ({error}); fetch it again") from error
        config = _read_json(directory / "tokenizer_config.json")
        named_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in NAMED_TOKENS
            if (token := config.get(name)) is not None
        }
        eos_token_ids = _eos_token_ids(directory, core.token_to_id(named_tokens.get("eos_token", "")))
        return cls(core, eos_token_ids, named_tokens, _chat_template(directory, config))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds the tokens that the model expects around a text.

        Raises `WealdError(INVALID_ARGUMENT)` when `text` has no UTF-8 form.
        """
        try:
            return self._core.encode(text, add_special_tokens=special).ids
        except TypeError as error:
            raise invalid("the text contains half a surrogate pair; send valid Unicode") from error

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        return self._core.decode(token_ids, skip_special_tokens=skip_special)

    def text_of(self, token_id: int) -> str:
        """The text of one token, special ones included."""
        return self.decode([token_id], skip_special=False)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` makes anything of the token."""
        return token_id not in self.special_ids and bool(self._core.id_to_token(token_id))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the conversation, up to where the assistant's next message begins.

        Raises as `render` does.
        """
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation by the model's chat template, up to where the assistant's next message begins.

        Raises `WealdError(INVALID_ARGUMENT)` when the model has no chat template, or one that refuses
        the messages.
        """
        if self._template is None:
            raise invalid("this model has no chat template; give it plain text with --prompt instead")
        if not messages:
            raise invalid("the conversation is empty; send at least one message")
        plain = [dict(message) for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._named_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise invalid(f"the model's chat template refuses these messages: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError) as error:
        raise incompatible(f"{path} is not a JSON object ({error}); fetch it again") from error


def _eos_token_ids(directory: Path, eos_token_id: int | None) -> frozenset[int]:
    named = [
        _read_json(directory / file).get("eos_token_id") for file in ("generation_config.json", "config.json")
    ]
    for ids in (*named, eos_token_id):
        if isinstance(ids, int):
            return frozenset({ids})
        if ids:
            return frozenset(ids)
    raise incompatible(
        f"{directory} names no end of sequence; set eos_token_id in its generation_config.json"
    )


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Template | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {template["name"]: template["template"] for template in source}.get("default")
    if source is None:
        return None
    # The environment of transformers' `apply_chat_template`: templates are written against it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise incompatible(f"{directory} has a malformed chat template ({error}); fetch it again") from error


class _Generation(Extension):
    """`{% generation %}` marks text to train on; for a prompt it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
