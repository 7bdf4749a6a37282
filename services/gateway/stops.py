"""Stop strings: where a text ends although the model would go on."""

from collections.abc import Sequence

from services.types.errors import invalid


class StopMatcher:
    """Cuts a stream of text at the first of several stop strings, however the stream is chunked.

    The stop string that is complete first wins; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Cut before the stop string, or with `include` behind it.

        Raises:
            WealdError: `INVALID_ARGUMENT` when a stop string is empty.
        """
        if "" in stops:
            raise invalid("a stop string must not be empty; leave it out instead")
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._include = include
        self._matched = [0] * len(stops)
        """Characters of each stop that the text so far ends with."""
        self._held = ""
        self._found = False

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """Take the next text; return what can go out now, and whether a stop was found.

        The text behind the cut is dropped, in this push and all that follow. While not `armed`, a stop that
        is complete is text like any other; one that begins here can be found later.
        """
        if self._found:
            return "", True
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1) if self._stops else ():
            complete = 0
            for index, (stop, borders) in enumerate(self._stops):
                matched = _advance(stop, borders, self._matched[index], character)
                if matched == len(stop):
                    complete = max(complete, matched)
                    matched = borders[-1]
                self._matched[index] = matched
            if complete and armed:
                self._held, self._found = "", True
                return pending[: end if self._include else end - complete], True
        cut = len(pending) - (0 if self._include else max(self._matched, default=0))
        self._held = pending[cut:]
        return pending[:cut], False

    def flush(self) -> str:
        """Return what was held back, when the text ends without a stop."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """How much of `stop` the text ends with after `character`, when before it that was `matched`."""
    while matched and stop[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop[matched] == character)


def _borders(stop: str) -> list[int]:
    """Per prefix of `stop`, the length of its longest proper suffix that `stop` begins with (as in KMP)."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_advance(stop, borders, borders[-1], character))
    return borders
