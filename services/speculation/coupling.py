"""Coupled drafting: what a session will draw, as far as its dice tell (DESIGN section 4).

The target draws `argmax(log p / T + G)`, and `G` is known before it does. A drafter that ranks candidates by
`log q / T + G` proposes what is likely to be drawn, not only what is likely.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.speculation.noise import gumbel, signed
from services.speculation.sampling import Context, process
from services.types.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a session draws its tokens, and whether its trees may know."""

    params: SamplingParams = _GREEDY
    seed: int = 0
    prompt: int = 0
    """Tokens of its prompt."""
    coupled: bool | None = None
    """Whether the noise counts, or chances are those before the dice fall; None: as the drafter has it."""


LIKELIEST = Drawing()
"""The most likely token, always."""


class Odds:
    """The chance of every draft token to be the one that is drawn, in the trees of some sessions."""

    def __init__(
        self,
        drawings: Sequence[Drawing],
        pending: Sequence[int],
        committed: Callable[[int], Sequence[int]],
        vocabulary: Tensor,
        known: Mapping[int, int],
    ) -> None:
        """Of S sessions.

        Args:
            drawings: how each draws.
            pending: position of the pending token of each.
            committed: tokens of one, the pending one last; asked for only where processors look at them.
            vocabulary: target id of each draft token, int64 `[V]`.
            known: the draft token of each of these ids.
        """
        self._drawings = drawings
        self._pending = pending
        self._vocabulary = vocabulary
        self._known = known
        self._sampled = [i for i, d in enumerate(drawings) if d.params.temperature > 0]
        self._shaped = {
            i: self._context(drawing, committed(i))
            for i, drawing in enumerate(drawings)
            if _shaped(drawing.params)
        }
        self.coupled = [i for i in self._sampled if drawings[i].coupled]
        """Sessions whose noise counts."""

    def __call__(self, level: int, logits: Tensor, paths: Tensor) -> Tensor:
        """Logarithms of chances.

        Args:
            level: of the tokens that are drawn, from 1 on.
            logits: of the head, for the rows that propose them, `[S, f, V]`.
            paths: from the root to each row, itself included, the root not, int64 `[S, f, level - 1]`.

        Returns:
            `[S, f, V]`, at most 0; -inf where a token cannot be drawn.
        """
        scores = logits.clone() if self._sampled or self._shaped else logits
        for i, context in self._shaped.items():
            scores[i] = self._process(context, logits[i], paths[i])
        for i in set(self._sampled) - self._shaped.keys():
            scores[i] /= self._drawings[i].params.temperature
        if self.coupled:
            scores[self.coupled] += self.noise(level, scores.device)[:, None].to(scores.dtype)
        return scores.log_softmax(-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)

    def noise(self, level: int, device: torch.device) -> Tensor:
        """`G` of the draft tokens where the coupled sessions draw those of a level, float64 `[s, V]`."""
        seeds = [signed(self._drawings[i].seed) for i in self.coupled]
        positions = [self._pending[i] + level for i in self.coupled]
        drawn = torch.tensor([seeds, positions], device=device)
        return gumbel(drawn[0], drawn[1], self._vocabulary)

    def _process(self, context: Context, logits: Tensor, paths: Tensor) -> Tensor:
        """Scores after the request's processors, over the draft vocabulary alone, `[f, V]`."""
        contexts = [
            replace(context, output=(*context.output, *self._folded(path))) for path in paths.tolist()
        ]
        unknown = logits.new_full((len(contexts), 1), -torch.inf)
        return process(torch.cat([logits, unknown], -1), contexts)[:, :-1]

    def _context(self, drawing: Drawing, tokens: Sequence[int]) -> Context:
        """What stands before a tree, in draft tokens."""
        params, known = drawing.params, self._known
        bias = {known[token]: value for token, value in params.logit_bias.items() if token in known}
        ends = frozenset(self._folded(params.stop_token_ids))
        prompt, output = self._folded(tokens[: drawing.prompt]), self._folded(tokens[drawing.prompt :])
        return Context(replace(params, logit_bias=bias), drawing.seed, prompt, output, ends)

    def _folded(self, tokens: Sequence[int]) -> list[int]:
        """As draft tokens; one that the head does not know stands in a column behind theirs."""
        return [self._known.get(token, len(self._known)) for token in tokens]


def _shaped(params: SamplingParams) -> bool:
    """Whether more than the temperature stands between logits and scores."""
    cut = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    ends = params.min_tokens > 0 and params.stop_token_ids
    return bool(cut or ends or params.penalised or params.logit_bias)
