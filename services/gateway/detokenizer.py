"""Token ids to text while they are still being generated."""

from collections.abc import Iterable

from services.gateway.tokenizer import Tokenizer

CONTEXT = 4
"""Tokens of context: at least four bytes, enough to tell whether a UTF-8 character is unfinished."""
UNFINISHED = "\ufffd"
"""What a character decodes to while bytes of it are missing."""


class Detokenizer:
    """The text of one session's output, handed out as soon as it can never change.

    All `push` results and that of `flush`, joined, equal `decode` of all tokens at once. A push takes time
    in proportion to its own tokens, however many came before. A run of byte-fallback tokens is held until it
    ends, since one bad byte would turn all of it into replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """Tokens that have text: some whose text is out, as context, then those held back."""
        self._settled = 0
        """Leading tokens of the window before its open run of byte-fallback tokens."""
        self._sent = 0
        """Leading characters of the window's text that are out."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that became final."""
        for token_id in filter(self._tokenizer.has_text, token_ids):
            self._window.append(token_id)
            if token_id not in self._tokenizer.byte_ids:
                self._settled = len(self._window)
        fresh = self._final_text()[self._sent :]
        outdated = max(self._settled - CONTEXT, 0)
        del self._window[:outdated]
        self._settled -= outdated
        self._sent = len(self._final_text())
        return fresh

    def flush(self) -> str:
        """Return what was held back; no token may follow."""
        return self._tokenizer.decode(self._window)[self._sent :]

    def _final_text(self) -> str:
        return self._tokenizer.decode(self._window[: self._settled]).removesuffix(UNFINISHED)
