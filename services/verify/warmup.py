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
LONGEST_S = 0.25
"""After a step that takes so long, larger ones are left to be learnt at work."""


def warm_up(verifier: Verifier, cost: Cost, most: int) -> None:
    """Measure steps of 1, 2, 4, … rows, up to `most` or what the pages hold; nothing stays open."""
    if verifier.max_model_len < 2 * PROMPT:
        return
    sessions = verifier.pool.num_pages // pages_for(PROMPT, verifier.pool.page_size)
    rows, most = 1, min(most, MAX_NODES * sessions)
    while rows <= most:
        taken = [_step(verifier, rows) for _ in range(REPEATS)][1:]
        for seconds in taken:
            cost.observe(rows, seconds)
        if max(taken) > LONGEST_S:
            break
        rows *= 2
    verifier.tokens_forwarded = verifier.tokens_prefilled = 0


def _step(verifier: Verifier, rows: int) -> float:
    """Seconds of a step of trees with so many nodes together."""
    full, rest = divmod(rows, MAX_NODES)
    sizes = [MAX_NODES] * full + [rest] * (rest > 0)
    params = SamplingParams(max_tokens=PROMPT, temperature=0.0, ignore_eos=True)
    trees = {}
    for i, size in enumerate(sizes):
        prompt = tuple((i + j) % verifier.target.vocab_size for j in range(PROMPT))
        session = Session(f"warm-up {i}", prompt, params, 0)
        (root,) = verifier.open(session).outcome.tokens
        trees[session.id] = _binary(root, size)
    started = time.perf_counter()
    verifier.step(trees)
    taken = time.perf_counter() - started
    for id in trees:
        verifier.close(id)
    return taken


def _binary(root: int, nodes: int) -> DraftTree:
    """Every node has two children: six levels, whatever the context allows."""
    tokens = (root, *(i % 2 for i in range(1, nodes)))
    return DraftTree(tokens, (-1, *((i - 1) // 2 for i in range(1, nodes))), (1.0, *[0.5] * (nodes - 1)))
