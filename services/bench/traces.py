"""Traces: at every position of an answer, the trees proposed there and how much of them is accepted.

Whatever is accepted of a tree, the next one stands at a position of the same answer, and a smaller tree is a
part of the recorded one: so a trace replays the rounds of any policy without a model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from services.bench.questions import read_questions
from services.bench.rounds import BEAM, LEVELS, hits
from services.draft.drafter import Drafter
from services.engine.head import EagleHead
from services.engine.target import Target
from services.local.models import Models
from services.speculation.coupling import Drawing
from services.speculation.growth import DynamicPlan, as_given, flatten, grow, rerank
from services.speculation.shapes import EAGLE_1_TREE
from services.types.configuration import AUTO_BUDGET, AUTO_LEVELS, DraftConfig, TreeShape
from services.types.errors import invalid
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import MAX_NODES, DraftTree
from services.verify.verifier import Verifier, pages_for

PACKAGED = Path(__file__).parent / "traces" / "smollm2-135m.npz"
"""Answers of SmolLM2-135M to questions of all six sets, at temperature 0 and 1."""
SHAPES = {
    TreeShape.DYNAMIC: DraftConfig(levels=AUTO_LEVELS, beam=BEAM, budget=AUTO_BUDGET),
    TreeShape.STATIC: DraftConfig(shape=TreeShape.STATIC),
}
"""The trees that are recorded: all others are parts of these."""
LEAST_LOG = 16.0
"""Values are kept down to exp(-16)."""
EASY, HARD = 0.995, 0.6
"""Of an easy token one of the ten children is right so often, of a hard one so often."""


@dataclass(frozen=True)
class Guess:
    """A tree that was proposed at a position, and what the target accepts of it."""

    tree: DraftTree
    """The token of each node is its own index: so what is left of the tree says which nodes those were."""
    path: tuple[int, ...]
    """Accepted nodes, root excluded."""

    @cached_property
    def ranking(self) -> tuple[int, ...]:
        """Draft nodes, best value first, ties to the earlier."""
        return tuple(sorted(range(1, len(self.tree)), key=lambda node: -self.tree.values[node]))

    @cached_property
    def by_level(self) -> tuple[tuple[int, ...], ...]:
        """Draft nodes of each level."""
        depths = self.tree.depths
        return tuple(
            tuple(node for node, at in enumerate(depths) if at == depth) for depth in range(1, depths[-1] + 1)
        )

    def part(self, levels: int, budget: int) -> DraftTree:
        """What is left of the tree with so many levels, and so many nodes, root included."""
        depths = self.tree.depths
        chosen = [node for node in self.ranking if depths[node] <= levels][: budget - 1]
        return self.tree.keep((0, *sorted(chosen)))

    def accepted(self, tree: DraftTree) -> tuple[int, ...]:
        """Nodes of a part of the tree that the target accepts: the path as far as the part has it."""
        index = {node: i for i, node in enumerate(tree.tokens)}
        path: list[int] = []
        for node in self.path:
            if node not in index:
                break
            path.append(index[node])
        return tuple(path)


@dataclass(frozen=True)
class Trace:
    """An answer: a guess of each shape at each of its positions, the first drawn by the prefill."""

    task: str
    temperature: float
    guesses: dict[TreeShape, tuple[Guess, ...]]

    def __len__(self) -> int:
        return len(self.guesses[TreeShape.DYNAMIC])


def record(
    models: Models,
    directory: Path,
    answers: int,
    max_tokens: int,
    temperatures: Sequence[float],
    file: Path,
) -> None:
    """Answer questions of each set by plain steps, and write what the head would have proposed meanwhile.

    Args:
        models: with a head.
        directory: of the question sets.
        answers: of each set, at each temperature.
        max_tokens: positions of an answer at most.
        temperatures: at which each question is answered.
        file: where the traces go.

    Raises:
        WealdError: `INVALID_ARGUMENT` without a head, or when there is no question set.
    """
    if models.head is None:
        raise invalid("traces are of a draft head: name one with --speculative-model")
    asked = [
        (task, number, prompt, temperature)
        for task, prompts in read_questions(directory, answers).items()
        for number, prompt in enumerate(prompts)
        for temperature in temperatures
    ]
    traces = []
    for task, number, prompt, temperature in tqdm(asked, desc="record", unit="answer"):
        params = SamplingParams(max_tokens=max_tokens + AUTO_LEVELS, temperature=temperature)
        session = Session(f"{task}-{number}", tuple(models.chat(prompt)), params, number)
        trace = follow(models.target, models.head, session)
        kept = {shape: guesses[:max_tokens] for shape, guesses in trace.guesses.items()}
        traces.append(Trace(task, temperature, kept))
    write(file, traces)


def follow(target: Target, head: EagleHead, session: Session) -> Trace:
    """Decode a session by plain steps, and propose a tree of each shape at every position.

    The answer's last positions lack what comes behind its end: their paths are cut there.
    """
    tokens = len(session.prompt) + session.params.max_tokens
    verifier = Verifier(target, num_pages=pages_for(tokens))
    scratch = sum(config.levels * config.beam for config in SHAPES.values())
    pages = len(SHAPES) * pages_for(tokens + scratch)
    drafter = Drafter(head, SHAPES[TreeShape.DYNAMIC], num_pages=pages)
    trees: dict[TreeShape, list[DraftTree]] = {shape: [] for shape in SHAPES}
    opened = verifier.open(session)
    output, outcome = list(opened.outcome.tokens), opened.outcome
    drawing = Drawing(session.params, session.seed, len(session.prompt))
    for shape, config in SHAPES.items():
        needed = drafter.open(shape, (*session.tokens, *output), config, drawing)
        drafter.advance(shape, (), opened.features[needed:])
    while not outcome.finish:
        for shape in SHAPES:
            trees[shape] += drafter.propose([shape])
        verified = verifier.verify({session.id: DraftTree.root(output[-1])})[session.id]
        outcome = verified.outcome
        output += outcome.tokens
        for shape in SHAPES:
            drafter.advance(shape, outcome.tokens, verified.features)
    guesses = {
        shape: tuple(_guess(tree, output[i + 1 :]) for i, tree in enumerate(proposed))
        for shape, proposed in trees.items()
    }
    return Trace("", session.params.temperature, guesses)


def write(file: Path, traces: Sequence[Trace]) -> None:
    """Write traces without a text: parents, values in 256 steps, and the last accepted node of each tree."""
    tasks = sorted({trace.task for trace in traces})
    columns: dict[str, Any] = {
        "tasks": np.array(tasks),
        "task": np.array([tasks.index(trace.task) for trace in traces], np.uint8),
        "temperature": np.array([trace.temperature for trace in traces], np.float32),
        "positions": np.array([len(trace) for trace in traces], np.uint16),
    }
    for shape in SHAPES:
        guesses = [guess for trace in traces for guess in trace.guesses[shape]]
        trees = [guess.tree for guess in guesses]
        columns |= {
            f"{shape}_nodes": np.array([len(tree) for tree in trees], np.uint8),
            f"{shape}_parents": np.array([p for tree in trees for p in tree.parents[1:]], np.uint8),
            f"{shape}_values": _packed([v for tree in trees for v in tree.values[1:]]),
            f"{shape}_last": np.array([guess.path[-1] if guess.path else 0 for guess in guesses], np.uint8),
        }
    np.savez_compressed(file, **columns)


def read(file: Path = PACKAGED) -> list[Trace]:
    """Read traces.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the file holds none.
    """
    try:
        with np.load(file, allow_pickle=False) as stored:
            columns = dict(stored)
            guesses = {shape: list(_unpacked(columns, shape)) for shape in SHAPES}
            ends = np.cumsum([0, *columns["positions"].tolist()]).tolist()
            return [
                Trace(
                    str(columns["tasks"][task]),
                    float(temperature),
                    {shape: tuple(guesses[shape][start:end]) for shape in SHAPES},
                )
                for task, temperature, (start, end) in zip(
                    columns["task"], columns["temperature"], pairwise(ends), strict=True
                )
            ]
    except (OSError, ValueError, KeyError) as error:
        raise invalid(f"{file} holds no traces; write some with weald simulate record") from error


def drawn(tau: float, budget: int, coverage: float, positions: int, seed: int) -> Trace:
    """A trace of a head that is known by its τ alone, with all that it says being true.

    Of every token, easy or hard, the i-th likeliest child is right as often as `rounds.hits` says; there are
    as many easy ones as τ asks for. The head knows which are which: its confidences are these shares.

    Args:
        tau: of a tree of the published sizes at temperature 0.
        budget: nodes of that tree.
        coverage: share of the text that the draft vocabulary holds.
        positions: of the trace.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    ease, luck = rng.random(positions + AUTO_LEVELS), rng.random((positions, AUTO_LEVELS))
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        candidates = _grown(_profiles(ease < middle, 1.0, AUTO_LEVELS)[:, :LEVELS], LEVELS)
        values = candidates.log_values.gather(1, rerank(candidates, budget - 1)).exp()
        low, high = (middle, high) if 1 + float(values.sum(1).mean()) < tau else (low, middle)
    profiles = _profiles(ease < low, coverage, AUTO_LEVELS)
    candidates = _grown(profiles, AUTO_LEVELS)
    trees = flatten(candidates, rerank(candidates, MAX_NODES - 1), [0] * positions)
    # The right child by rank at each level, if any is: BEAM where none is.
    below = torch.from_numpy(luck)[..., None] >= profiles.cumsum(-1)
    right = below.sum(-1).tolist()
    shares = [dict(zip(EAGLE_1_TREE, values, strict=True)) for values in _eagle_1(profiles)]
    return Trace(
        "drawn",
        0.0,
        {
            TreeShape.DYNAMIC: tuple(_guess(tree, ranks) for tree, ranks in zip(trees, right, strict=True)),
            TreeShape.STATIC: tuple(
                _guess(_static(values), ranks) for values, ranks in zip(shares, right, strict=True)
            ),
        },
    )


def _profiles(easy: Any, coverage: float, levels: int) -> Tensor:
    """How often each child is right, by position and level, `[positions, levels, BEAM]`."""
    whole = hits(1.0, coverage, BEAM)
    each = torch.where(torch.from_numpy(easy)[:, None], EASY, HARD) * whole / hits(1.0, 1.0, BEAM).sum()
    return each.unfold(0, levels, 1).transpose(1, 2)[: len(easy) - levels]


def _grown(profiles: Tensor, levels: int) -> Any:
    """The candidates of every position; a token stands for its rank among its siblings."""
    logs = profiles.log().float()
    level = iter(range(1, levels))
    return grow(
        logs[:, 0],
        lambda tokens, parents: logs[:, next(level), None].expand(-1, tokens.shape[1], -1),
        DynamicPlan(levels, BEAM),
        torch.arange(BEAM),
        score=as_given,
    )


def _eagle_1(profiles: Tensor) -> list[list[float]]:
    """Confidences of the nodes of EAGLE-1's tree, in the order of its paths, by position."""
    columns = [profiles[:, len(path) - 1, path[-1]] for path in EAGLE_1_TREE]
    rows: list[list[float]] = torch.stack(columns, 1).tolist()
    return rows


def _static(confidences: dict[tuple[int, ...], float]) -> DraftTree:
    """EAGLE-1's tree; a token stands for its rank among its siblings."""
    paths = [(), *sorted(confidences, key=lambda path: (len(path), path))]
    index = {path: i for i, path in enumerate(paths)}
    parents = (-1, *(index[path[:-1]] for path in paths[1:]))
    tokens = (0, *(path[-1] for path in paths[1:]))
    return DraftTree(tokens, parents, (1.0, *(confidences[path] for path in paths[1:])))


def _guess(tree: DraftTree, said: Sequence[int]) -> Guess:
    """A tree of real tokens, and what the target says behind its root."""
    path, node = [], 0
    for token in said:
        child = tree.children[node].get(token)
        if child is None:
            break
        path.append(node := child)
    return Guess(replace(tree, tokens=tuple(range(len(tree)))), tuple(path))


def _packed(values: Sequence[float]) -> Any:
    """Values in 256 steps, finer towards 1; what is ranked stays ranked, save for equals."""
    logs = np.minimum(-np.log(np.maximum(np.array(values), 1e-30)), LEAST_LOG)
    return np.rint(255 * np.sqrt(logs / LEAST_LOG)).astype(np.uint8)


def _unpacked(columns: dict[str, Any], shape: TreeShape) -> Iterator[Guess]:
    values = np.exp(-LEAST_LOG * (columns[f"{shape}_values"] / 255.0) ** 2).tolist()
    parents, start = columns[f"{shape}_parents"].tolist(), 0
    for nodes, last in zip(
        columns[f"{shape}_nodes"].tolist(), columns[f"{shape}_last"].tolist(), strict=True
    ):
        above = parents[start : start + nodes - 1]
        worth = [1.0, *values[start : start + nodes - 1]]
        confidences = tuple(worth[i] / worth[parent] for i, parent in enumerate(above, 1))
        tree = DraftTree(tuple(range(nodes)), (-1, *above), (1.0, *confidences))
        start += nodes - 1
        yield Guess(tree, tree.path(last))
