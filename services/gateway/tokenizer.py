"""Text to token ids and back, chat templates included, for one checkpoint."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
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
LONG = 10_000
"""Characters from which on a text is worth giving other threads the processor while it is encoded."""


def _printable_bytes() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for (GPT-2's `bytes_to_unicode`)."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = _printable_bytes()


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
        self._bytes: dict[int, bytes | None] = {}
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
        self.longest = max(map(len, core.get_vocab()))
        """Characters that a token stands for at most."""

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
            if len(text) < LONG:
                return self._core.encode(text, add_special_tokens=special).ids
            # Of the two, only this one lets go of Python's lock meanwhile.
            return self._core.encode_batch([text], add_special_tokens=special)[0].ids
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

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text, maybe half a character; None where `decode` skips it."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._bytes_behind_others(token_id) if self.has_text(token_id) else None
        return self._bytes[token_id]

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
            raise invalid(
                "this model has no chat template; give it plain text instead: /v1/completions, or "
                "`weald generate --prompt` without --chat"
            )
        if not messages:
            raise invalid("the conversation is empty; send at least one message")
        plain = [dict(message) for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._named_tokens
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise invalid(f"the model's chat template refuses these messages: {error}") from error

    def _bytes_behind_others(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id) or ""
        if token_id in self.byte_ids:
            return bytes.fromhex(token[3:5])
        if self._byte_level:
            # The decoder takes a token with any other character for plain text.
            mapped = set(token) <= BYTES.keys()
            return bytes(BYTES[character] for character in token) if mapped else token.encode()
        anchor, before = self._anchor
        return self.decode([*anchor, token_id])[len(before) :].encode()

    @cached_property
    def _byte_level(self) -> bool:
        """Whether a token's characters stand for bytes."""
        return b'"ByteLevel"' in self._core.decoder.__getstate__() if self._core.decoder else False

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token with plain text, and that: many decoders drop the space that a text begins with."""
        for token_id in range(self.vocab_size):
            if token_id not in self.byte_ids and self.has_text(token_id):
                text = self.decode([token_id])
                if text.strip() == text != "":
                    return [token_id], text
        return [], ""


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
