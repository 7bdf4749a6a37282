"""Drawing the next token: logits processors in vLLM's order, then Gumbel-max with seeded noise; logprobs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.speculation.noise import gumbel, signed
from services.types.outcome import TokenLogprobs
from services.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Context:
    """What stands before the token to be drawn."""

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    """Committed output tokens, then the path from the root to the node that draws."""
    ends: frozenset[int]
    """Tokens that end the text: banned below `min_tokens`."""
    allowed: Tensor | None = None
    """Bool `[V]`: the tokens that a grammar lets follow, at least one; None without a grammar."""

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn."""
        return len(self.prompt) + len(self.output)


def process(logits: Tensor, contexts: Sequence[Context]) -> Tensor:
    """Scores whose softmax is the distribution each row draws from.

    Bias, bans and grammar, penalties, temperature, min-p, top-k, top-p, in this order, as in vLLM. At
    temperature 0 the scores are not divided and no token is cut: neither changes the most likely one. Where
    bias and bans leave no token at all, the draw is token 0; where they leave none that the grammar allows,
    they give way to it.

    Args:
        logits: raw logits `[R, V]` of any floating dtype.
        contexts: one for each row.

    Returns:
        float32 `[R, V]` (float64 if the logits are), -inf where a token cannot be drawn.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = logits.to(exact, copy=True)
    for row, context in zip(scores, contexts, strict=True):
        _bias(row, context)
        _penalise(row, context)
    sampled = [i for i, c in enumerate(contexts) if c.params.temperature > 0]
    for i in sampled:
        params = contexts[i].params
        row = scores[i] if params.temperature == 1 else scores[i].div_(params.temperature)
        if params.min_p > 0:
            _keep_min_p(row, params.min_p)
        if 0 < params.top_k < row.numel():
            row.masked_fill_(row < row.topk(params.top_k).values[-1], -torch.inf)
        if params.top_p < 1:
            _keep_top_p(row, params.top_p)
    return scores


def draw(logits: Tensor, contexts: Sequence[Context]) -> list[int]:
    """The token each row draws: `argmax(scores + G(seed, position))`, or `argmax(scores)` at temperature 0.

    A function of the row's logits and context alone: neither the batch nor global random state matters.

    Args:
        logits: raw logits `[R, V]`.
        contexts: one for each row.
    """
    scores = process(logits, contexts)
    sampled = [i for i, c in enumerate(contexts) if c.params.temperature > 0]
    if not sampled:
        return scores.argmax(-1).tolist()
    device = logits.device
    seeds = torch.tensor([signed(contexts[i].seed) for i in sampled], device=device)
    positions = torch.tensor([contexts[i].position for i in sampled], device=device)
    noise = gumbel(seeds, positions, scores.shape[-1])
    if len(sampled) == len(contexts):
        return (scores + noise).argmax(-1).tolist()
    drawn = scores.argmax(-1)
    drawn[sampled] = (scores[sampled] + noise).argmax(-1)
    return drawn.tolist()


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What is told of each row's token: its own log-probability, and those of the most likely tokens.

    Args:
        logits: raw logits `[R, V]`, R at least 1; float32 is computed with, or float64 if they are.
        tokens: the token committed, for each row.
        tops: so many most likely tokens, for each row; all V where there are fewer.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = logits.to(exact).log_softmax(-1)
    rows = torch.arange(len(tokens), device=logits.device)
    own = log_probs[rows, torch.tensor(tokens, device=logits.device)].tolist()
    best: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if most := min(max(tops), logits.shape[-1]):
        # Which of several tied tokens `topk` takes is not defined: all that reach its least value are told.
        least = log_probs.topk(most).values[:, -1:]
        found = (log_probs >= least).nonzero(as_tuple=True)
        for row, token, value in zip(*(part.tolist() for part in (*found, log_probs[found])), strict=True):
            best[row].append((token, value))
    # Each row's tokens come in ascending order, and sorting keeps it among equals.
    ranked = [sorted(row, key=lambda pair: -pair[1]) for row in best]
    return [TokenLogprobs(value, tuple(row[:top])) for value, row, top in zip(own, ranked, tops, strict=True)]


def _bias(row: Tensor, context: Context) -> None:
    params = context.params
    allowed = None if context.allowed is None else context.allowed.to(row.device)
    within = row if allowed is None else row.masked_fill(~allowed, -torch.inf)
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=row.device)
        row[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if len(context.output) < params.min_tokens and context.ends:
        row[torch.tensor(sorted(context.ends), device=row.device)] = -torch.inf
    if allowed is not None:
        row.masked_fill_(~allowed, -torch.inf)
        row.copy_(torch.where(row.isneginf().all(), within, row))


def _penalise(row: Tensor, context: Context) -> None:
    params = context.params
    if not params.penalised:
        return
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*context.prompt, *context.output}), device=row.device)
        logits = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    counts = Counter(context.output)
    if counts:
        tokens = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[tokens] -= params.frequency_penalty * times + params.presence_penalty


def _keep_min_p(row: Tensor, min_p: float) -> None:
    probabilities = row.softmax(-1)
    row.masked_fill_(probabilities < min_p * probabilities.max(), -torch.inf)


def _keep_top_p(row: Tensor, top_p: float) -> None:
    probabilities, order = row.softmax(-1).sort(descending=True, stable=True)
    mass_before = probabilities.cumsum(-1) - probabilities
    row[order[mass_before >= top_p]] = -torch.inf
