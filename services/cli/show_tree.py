"""A round drawn in the terminal: its draft tree, and where the target went in it."""

from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from services.types.outcome import Outcome
from services.types.tree import DraftTree

ACCEPTED = "bold green"
BONUS = "bold yellow"


def draw_round(tree: DraftTree, outcome: Outcome, title: str, text_of: Callable[[int], str]) -> Tree:
    """The tree of one round, best candidates first as the drafter ranked them.

    The accepted path is lit and carries ✓, the bonus token stands where the target left the tree, and nodes
    that did not stand in the target step are dim.

    Args:
        tree: what was drafted.
        outcome: what verification made of it.
        title: the line above the tree.
        text_of: token id → its text.
    """
    drawn = Tree(Text(title, "bold"), guide_style="dim")
    branches = [drawn.add(Text(f"{text_of(tree.tokens[0])!r} root"))]
    for node in range(1, len(tree)):
        label = Text(
            f"{text_of(tree.tokens[node])!r} c {tree.confidences[node]:.2f} V {tree.values[node]:.2f}"
        )
        if node in outcome.accepted:
            label.append(" ✓")
            label.stylize(ACCEPTED)
        elif node >= outcome.verified:
            label.stylize("dim")
        branches.append(branches[tree.parents[node]].add(label))
    if len(outcome.tokens) > len(outcome.accepted):
        left = outcome.accepted[-1] if outcome.accepted else 0
        branches[left].add(Text(f"{text_of(outcome.tokens[-1])!r} bonus", BONUS))
    return drawn
