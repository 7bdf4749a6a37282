"""The models a command runs: target, tokenizer and head, loaded without a word from third parties."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from services.draft.drafter import Drafter
from services.engine.checkpoints import resolve
from services.engine.head import EagleHead
from services.engine.names import PACKAGED
from services.engine.target import Target
from services.engine.transfer import DTYPES
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step, decode
from services.speculation.budget import Budget
from services.speculation.calibration import Calibration
from services.types.configuration import DraftConfig
from services.types.errors import invalid
from services.types.session import Session
from services.verify.grammar import Grammars
from services.verify.verifier import Verifier, pages_for

PACKAGED_HEADS = Path(__file__).parent.parent / "heads"
"""Heads that come with Weald: a directory for each short name of `PACKAGED` that has one."""


@dataclass(frozen=True, slots=True)
class Models:
    """A target, its tokenizer, and the head that drafts for it."""

    target: Target
    tokenizer: Tokenizer
    head: EagleHead | None
    """None decodes by plain steps only."""
    grammars: Grammars

    def chat(self, message: str) -> list[int]:
        """Token ids of a conversation that a user's message begins, up to where the answer begins."""
        return self.tokenizer.chat([{"role": "user", "content": message}])

    def decode(
        self, session: Session, config: DraftConfig | None, calibration: Calibration | None = None
    ) -> Iterator[Step]:
        """Decode one session in this process, with as many pages as it can need.

        Args:
            session: what to generate.
            config: the trees to draft; None, or no head, for plain steps.
            calibration: what is known of the head's confidences, and will be.

        Raises:
            WealdError: at the first step, as `Verifier.open` does.
        """
        tokens = min(len(session.prompt) + session.params.max_tokens, self.target.context_length)
        verifier = Verifier(self.target, num_pages=pages_for(tokens), grammars=self.grammars)
        drafter = budget = None
        if self.head and config:
            scratch = config.levels * config.beam
            pages = pages_for(tokens + scratch)
            drafter = Drafter(self.head, config, num_pages=pages, calibration=calibration)
            budget = Budget() if config.adaptive_budget else None
        with quiet():
            yield from decode(verifier, drafter, [session], budget)


def load(model: str, head: str | None, *, speculative: bool, device: str, dtype: str) -> Models:
    """Load what a command names; a spinner shows on a terminal, and nothing else is written.

    Args:
        model: as `checkpoints.resolve` takes it.
        head: likewise; None for the one packaged with the model.
        speculative: whether a head is needed.
        device: as `usable_device` takes it.
        dtype: as `precision` takes it.

    Raises:
        WealdError: `INVALID_ARGUMENT` when there is no such device or dtype, or speculation has no head;
            `INCOMPATIBLE_CHECKPOINT` and `UNSUPPORTED_MODEL` as the engine does.
    """
    placed = usable_device(device)
    exact = precision(dtype, placed)
    drafting = head_of(model, head) if speculative else None
    waiting = Console(file=sys.stderr).status(f"Loading {model}")
    # The conversion of GGUF files reports its progress whatever transformers was told.
    with quiet(), waiting, contextlib.redirect_stderr(io.StringIO()):
        directory = resolve(model)
        target = Target.load(directory, exact, placed)
        loaded = EagleHead.load(resolve(drafting), *target.embeddings()) if drafting else None
    grammars = Grammars(directory, target.vocab_size, target.eos_token_ids)
    return Models(target, Tokenizer.load(directory), loaded, grammars)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep notices and progress bars of transformers off the terminal."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def usable_device(name: str) -> torch.device:
    """The device of a name: `auto` (cuda where there is one), `cpu`, `cuda`, `cuda:1`, …

    Raises:
        WealdError: `INVALID_ARGUMENT` when it is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unusable = invalid(f"there is no device {name!r} here; use cpu, or cuda on a machine that has it")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise unusable from error
    if device.type not in ("cpu", "cuda"):
        raise unusable
    return device


def precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name: one of `DTYPES`, or `auto`, which is bfloat16 on cuda, else float32.

    Raises:
        WealdError: `INVALID_ARGUMENT` for another name.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise invalid(f"there is no dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def head_of(model: str, head: str | None) -> str:
    """The head named, or else the one packaged with the model.

    Raises:
        WealdError: `INVALID_ARGUMENT` when there is none.
    """
    if head:
        return head
    directory = PACKAGED_HEADS / model
    if model not in PACKAGED or not directory.is_dir():
        raise invalid(
            f"speculation needs a draft head made for {model}: name its directory with --speculative-model, "
            "or decode without one by --speculative off"
        )
    return str(directory)
