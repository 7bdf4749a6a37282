"""A program that compiles one grammar, to see in a process of its own what that takes.

llguidance's limits do not bound it: ten patterns that all have to match keep it busy for minutes, while its
memory grows.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SECONDS = 3
"""Of one processor."""
BYTES = 1 << 29
"""Of address space."""


class Bytes:
    """A vocabulary of all bytes and an end, in the form that llguidance takes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text."""
        return list(text)


def limits() -> "LLParserLimits":
    """What one session's grammar may take while it is used: some 100 MB at worst."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def main() -> None:
    """Compile the grammar on standard input, and say what is wrong with it, if anything."""
    import resource  # not everywhere, but wherever this program runs

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    matcher = LLMatcher(tokenizer, sys.stdin.read(), log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    main()
