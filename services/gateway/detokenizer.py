"""Token ids to text while they are still being generated."""

from collections.abc import Iterable, Sequence

from services.gateway.tokenizer import Tokenizer

CONTEXT = 4
"""Tokens of context: at least four bytes, enough to tell whether a UTF-8 character is unfinished."""
UNFINISHED = "\ufffd"
"""What a character decodes to while bytes of it are missing."""


class Detokenizer:
    """The text of one session's output, handed out as soon as it can never change.

    All `push` results and that of `flush`, joined, equal `decode` of all tokens; behind a prompt, what that
    adds to the prompt's text. A push takes time in proportion to its own tokens, however many came
    before. A run of byte-fallback tokens is held until it ends, since one bad byte would turn all of it into
    replacement characters; so the output's first run is one of its own, whatever the prompt ends with.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Begin a text, or go on with that of `prompt`: many decoders drop the space a text begins with."""
        self._tokenizer = tokenizer
        self._window = self._context(prompt)
        """Tokens that have text: some whose text is out, as context, then those held back."""
        self._settled = len(self._window)
        """Leading tokens of the window before its open run of byte-fallback tokens."""
        self._text = tokenizer.decode(self._window)
        """Of these."""
        self._sent = len(self._text)
        """Characters of it that are out: all but a last one that is unfinished."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that became final."""
        return "".join(text for token_id in token_ids for text in self.read(token_id))

    def read(self, token_id: int) -> tuple[str, str]:
        """Take the next token; return the text that became final.

        Returns:
            What is of the tokens before it alone, and the rest, of which some is its own.
        """
        if not self._tokenizer.has_text(token_id):
            return "", ""
        run_ended = len(self._window) > self._settled
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return "", ""
        before = self._tokenizer.decode(self._window[:-1]) if run_ended else self._text
        whole = self._tokenizer.decode(self._window)
        sent, final = self._sent, whole.removesuffix(UNFINISHED)
        if not whole.startswith(self._text[:sent]):
            # The prompt ends inside a character, which comes whole.
            sent = len(self._text.removesuffix(UNFINISHED))
        own = len(before) if final.startswith(before) else sent
        self._settled, self._text, self._sent = len(self._window), whole, max(sent, len(final))
        if self._settled > 2 * CONTEXT:
            self._forget()
        return final[sent:own], final[own:]

    def flush(self) -> str:
        """Return what was held back; no token may follow."""
        return self._tokenizer.decode(self._window)[self._sent :]

    def _forget(self) -> None:
        """Drop tokens that are not needed as context any more."""
        held = len(self._text) - self._sent
        del self._window[:-CONTEXT]
        self._settled = CONTEXT
        self._text = self._tokenizer.decode(self._window)
        self._sent = len(self._text) - held

    def _context(self, prompt: Sequence[int]) -> list[int]:
        window: list[int] = []
        for token_id in reversed(prompt):
            if len(window) == CONTEXT:
                break
            if self._tokenizer.has_text(token_id) and (window or token_id not in self._tokenizer.byte_ids):
                window.append(token_id)
        return window[::-1]
