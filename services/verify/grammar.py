"""Grammars: which tokens go on with a JSON document of a schema."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from services.types.errors import WealdError, invalid
from services.verify import rehearsal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

REMEMBERED = 256
"""Schemas that are known to compile."""

_log = logging.getLogger(__name__)


class Grammars:
    """Begins the grammars of sessions, in any thread; llguidance is loaded for the first one."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """For the target whose checkpoint is in `directory`, with logits of `vocab_size` tokens."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def begin(self, schema: str, output: Sequence[int], ends: frozenset[int]) -> "Grammar":
        """The grammar of one session, behind its output so far.

        Each session has a matcher of its own: copies of one share a lexer, whose limits they would use up
        and whose errors they would get together. A usual schema takes some milliseconds, the first of all
        about a second; `rehearsal` bounds what one can take.

        Args:
            schema: text of a JSON schema.
            output: tokens committed so far.
            ends: tokens that end the text.

        Raises:
            WealdError: `INVALID_ARGUMENT` when the schema does not compile, with llguidance's reason; when
                the target cannot write such documents; when the output does not begin one.
        """
        from llguidance import LLMatcher

        if not self._eos_token_ids:
            raise invalid("this target has no end-of-sequence token to end a document; leave json_schema out")
        compiled = _compilable(schema)
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=rehearsal.limits())
        if matcher.is_error():
            raise _refused(matcher.get_error())
        grammar = Grammar(matcher, self._vocab_size, ends)
        grammar.advance(output)
        grammar.allowed(())
        return grammar

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                str(self._directory / "tokenizer.json"), self._vocab_size, sorted(self._eos_token_ids)
            )
        except ValueError as error:
            raise invalid(
                f"json_schema cannot be had with this target's tokenizer ({error}); leave it out"
            ) from error


class Grammar:
    """Where one session's document stands; end tokens, which are not part of it, stay out of the matcher."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, ends: frozenset[int]) -> None:
        """A document that begins with what `matcher` takes next; it is this grammar's alone."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._end_ids = torch.tensor(sorted(ends))
        self._ahead: list[int] = []
        """Tokens that the matcher has taken behind the committed ones."""

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Bool `[V]`, on the CPU: what may follow the committed tokens and `path`; None behind the end.

        At least one token: end tokens exactly where the document can end, of the others those that go on
        with it.

        Args:
            path: tokens each of which was allowed.

        Raises:
            WealdError: `INVALID_ARGUMENT` when nothing is allowed, or the document is too complex to go on.
        """
        if not self._ends.isdisjoint(path):
            return None
        self._go(path)
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        unpacked = numpy.unpackbits(bits, count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(unpacked).view(torch.bool)
        allowed[self._end_ids] = self._matcher.is_accepting()
        if self._matcher.is_error():
            reason = _plain(self._matcher.get_error())
            raise invalid(
                f"the text cannot go on by its json_schema ({reason}); simplify the schema, or send the "
                "request again with another seed"
            )
        if not allowed.any():
            raise invalid(
                "the text cannot go on by its json_schema: the target's vocabulary has no token for what "
                "must follow, or it is one that ends the text; change the schema, or stop_token_ids"
            )
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind committed tokens, none of which ends the text."""
        self._go(tokens)
        self._ahead = []

    def _go(self, path: Sequence[int]) -> None:
        """Stand behind `path`; a matcher that fails says so from then on."""
        common = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._ahead, path, strict=False))
        )
        self._matcher.rollback(len(self._ahead) - common)
        self._matcher.consume_tokens(list(path[common:]))
        self._ahead = list(path)


@lru_cache(maxsize=REMEMBERED)
def _compilable(schema: str) -> str:
    """llguidance's form of a schema that has been seen to compile; `WealdError` for another one."""
    from llguidance import LLMatcher

    try:
        document = json.loads(schema)
        if not isinstance(document, dict):
            raise _refused("it is no JSON object")
        if "x-guidance" in document:
            raise _refused("x-guidance is not supported")
        # The text itself would be pasted into llguidance's form, whatever it is.
        compiled = LLMatcher.grammar_from_json_schema(document)
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from error
    program = [sys.executable, "-P", "-X", "utf8", rehearsal.__file__]
    finished = subprocess.run(program, input=compiled, capture_output=True, encoding="utf-8")
    if finished.returncode:
        _log.warning("compiling a json_schema ended with %d: %s", finished.returncode, finished.stderr)
        raise _refused(
            f"it takes more than {rehearsal.SECONDS} s or {rehearsal.BYTES >> 20} MiB; write it with fewer "
            "patterns, properties and alternatives"
        )
    if finished.stdout:
        raise _refused(finished.stdout)
    return compiled


def _refused(reason: str) -> WealdError:
    return invalid(f"json_schema does not compile: {_plain(reason)}")


def _plain(reason: str) -> str:
    """In one line, without the mark that llguidance sets where details could stand."""
    return " ".join(reason.removesuffix("<non-verbose/>").split())
