"""How a round is drawn."""

from io import StringIO

from rich.console import Console

from services.cli.show_tree import ACCEPTED, draw_round
from services.types.outcome import Outcome
from services.types.session import FinishReason
from services.types.tree import DraftTree

TREE = DraftTree((0, 1, 2, 3, 1), (-1, 0, 0, 1, 2), (1.0, 0.75, 0.25, 0.5, 0.5))
WORDS = (" the", " oak", " [red]", "\n", " elm")


def drawn(outcome: Outcome) -> list[str]:
    """The lines of the drawing."""
    console = Console(file=StringIO(), width=60)
    with console.capture() as captured:
        console.print(draw_round(TREE, outcome, "round 3, τ 2.50", WORDS.__getitem__))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_candidates_stand_below_their_parents_with_confidence_value_and_their_fate() -> None:
    assert drawn(Outcome((2, 4), (2,), 5, None)) == [
        "round 3, τ 2.50",
        "└── ' the' root",
        "    ├── ' oak' c 0.75 V 0.75",
        "    │   └── '\\n' c 0.50 V 0.38",
        "    └── ' [red]' c 0.25 V 0.25 ✓",
        "        ├── ' oak' c 0.50 V 0.12",
        "        └── ' elm' bonus",
    ]


def test_a_text_that_ends_inside_the_tree_has_no_bonus_token() -> None:
    assert not any("bonus" in line for line in drawn(Outcome((2,), (2,), 5, FinishReason.STOP)))


def test_the_accepted_path_is_lit_and_what_was_not_verified_is_dim() -> None:
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", width=60)
    drawing = draw_round(TREE, Outcome((1, 4), (1,), 3, None), "round 1, τ 2.00", WORDS.__getitem__)
    styles = {segment.text: str(segment.style) for segment in console.render(drawing)}
    assert styles["' oak' c 0.75 V 0.75 ✓"] == ACCEPTED
    assert styles["' [red]' c 0.25 V 0.25"] == "None"
    assert styles["'\\n' c 0.50 V 0.38"] == "dim"
