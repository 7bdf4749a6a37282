"""What target steps of many sizes take, measured before the first session comes."""

import time

from services.speculation.cost import Cost
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import MAX_NODES, DraftTree
from services.verify.verifier import Verifier, pages_for

PROMPT = 8
REPEATS = 3
"""The first of each size is not counted: it may compile, and allocate."""
CONTEXT = PROMPT * (1 + REPEATS)
"""Tokens that a session comes to."""
MOST_ROWS, WITHIN_S = 256, 2.0
"""Larger sizes, and those that do not come about so soon, are learnt at work: a replica is waited for."""


def warm_up(verifier: Verifier, cost: Cost, most: int) -> None:
    """Measure steps of 1, 2, 4, … rows, up to `most` or what the pages hold; nothing stays open."""
    if verifier.max_model_len < CONTEXT:
        return
    sessions = verifier.pool.num_pages // pages_for(CONTEXT, verifier.pool.page_size)
    rows, most, began = 1, min(most, MOST_ROWS, MAX_NODES * sessions), time.perf_counter()
    while rows <= most and time.perf_counter() - began < WITHIN_S:
        for seconds in _steps(verifier, rows)[1:]:
            cost.observe(rows, seconds)
        rows *= 2
    verifier.tokens_forwarded = verifier.tokens_prefilled = 0


def _steps(verifier: Verifier, rows: int) -> list[float]:
    """Seconds of steps of trees with so many nodes together."""
    params = SamplingParams(max_tokens=CONTEXT - PROMPT, temperature=0.0, ignore_eos=True)
    sizes: dict[str, int] = {}
    for i, first in enumerate(range(0, rows, MAX_NODES)):
        prompt = tuple((i + j) % verifier.target.vocab_size for j in range(PROMPT))
        session = Session(f"warm-up {i}", prompt, params, 0)
        verifier.open(session)
        sizes[session.id] = min(MAX_NODES, rows - first)
    taken = []
    for _ in range(REPEATS):
        trees = {id: _binary(verifier.pending(id)[1], size) for id, size in sizes.items()}
        began = time.perf_counter()
        verifier.step(trees)
        taken.append(time.perf_counter() - began)
    for id in sizes:
        verifier.close(id)
    return taken


def _binary(root: int, nodes: int) -> DraftTree:
    """Every node has two children: six levels, whatever the context allows."""
    tokens = (root, *(i % 2 for i in range(1, nodes)))
    return DraftTree(tokens, (-1, *((i - 1) // 2 for i in range(1, nodes))), (1.0, *[0.5] * (nodes - 1)))
