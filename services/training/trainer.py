"""Training a head: regression on the target's features and cross-entropy on its distribution.

The losses are those of EAGLE (arXiv 2401.15077, section 3.2). With `unroll` above 1 the head is also trained
on its own predictions in place of true features, the input it meets at deeper levels of a tree (HASS,
arXiv 2408.15766; training-time test of EAGLE-3, arXiv 2503.01840), all positions at once.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from services.engine.head import EagleHead
from services.training.corpus import Sequences
from services.training.features import batches_by_length, padded
from services.types.errors import invalid


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How a head is trained. A resumed run must have the same."""

    epochs: int = 4
    batch_tokens: int = 2048
    """Tokens of a step, padding included."""
    learning_rate: float = 1.5e-3
    """At the end of warm-up; then a half cosine down to a twentieth of it."""
    warmup_steps: int = 100
    regression_weight: float = 0.2
    """Of the smooth-L1 loss on features in units of their standard deviation; cross-entropy has weight 1."""
    noise: float = 0.1
    """Uniform noise on the true features of the input, in standard deviations."""
    unroll: int = 2
    """Passes per step: the first on true features, each further one on the predictions of the one before."""
    validation_share: float = 0.03
    """Share of the sequences that is held out."""
    seed: int = 0


class Trainer:
    """A head in training: its optimizer, its place in the schedule, its validation curve."""

    def __init__(
        self, head: EagleHead, corpus: Sequences, features: Tensor, config: TrainingConfig, out: Path
    ) -> None:
        """Prepare a run, or resume the one in `out`.

        Args:
            head: built with transformers' own attention, float32.
            corpus: the sequences.
            features: the target's, `[N, H]`.
            config: a resumed run must have the same.
            out: directory of the head, its curve, and the state to resume from.

        Raises:
            WealdError: `INVALID_ARGUMENT` when `out` holds a run of another configuration.
        """
        self.head, self.corpus, self.features, self.config, self.out = head, corpus, features, config, out
        self.device = head.fc.weight.device
        self.scale = float(features[: 1 << 14].float().std())
        batches = batches_by_length(corpus, config.batch_tokens)
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(batches), generator=generator).tolist()
        held_out = max(1, round(config.validation_share * len(batches)))
        self._validation = [batches[i] for i in order[:held_out]]
        self._training = [batches[i] for i in order[held_out:]]
        if not self._training:
            raise invalid("the corpus is too small to hold any of it out; give more text")
        self.total_steps = config.epochs * len(self._training)
        self.optimizer = torch.optim.AdamW(
            head.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self._resume()

    def run(self, validate_every: int = 200) -> None:
        """Train to the end of the schedule; validates, saves the head and the state to resume from."""
        started, before = time.perf_counter(), self.curve[-1]["seconds"] if self.curve else 0.0
        bar = tqdm(
            self._steps(), total=self.total_steps, initial=self.step, desc="training", dynamic_ncols=True
        )
        for batch in bar:
            loss = self._train(batch)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self.step += 1
            if self.step % validate_every == 0 or self.step == self.total_steps:
                seconds = before + time.perf_counter() - started
                point = {"step": self.step, "seconds": seconds, "train_loss": loss} | self.validate()
                self.curve.append(point)
                bar.write("  ".join(f"{name} {value:.4g}" for name, value in point.items()))
                self._save()

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Held-out cross-entropy and top-1 agreement with the target, at levels 1 and 2 of a tree."""
        sums: dict[str, float] = {}
        count = 0
        self.head.eval()
        for batch in self._validation:
            entries = self._entries(batch)
            inputs = entries.features
            p = self._logits(entries.targets, entries).softmax(-1)
            for level in range(1, 3):
                with self._autocast():
                    predicted = self.head(inputs, entries.tokens, entries.positions)
                log_q = self._logits(predicted, entries).log_softmax(-1)
                agree = (log_q.argmax(-1) == p.argmax(-1)).sum()
                ce = -(p * log_q).sum()
                for name, value in ((f"top1_level{level}", agree), (f"ce_level{level}", ce)):
                    sums[name] = sums.get(name, 0.0) + float(value)
                inputs = _shifted(predicted, entries.features)
            count += int(entries.valid.sum())
        self.head.train()
        return {name: value / count for name, value in sums.items()}

    def _train(self, batch: list[int]) -> float:
        progress = max(0, self.step - self.config.warmup_steps) / max(1, self.total_steps)
        rate = min(1.0, (self.step + 1) / self.config.warmup_steps)
        rate *= 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * rate
        entries = self._entries(batch)
        noise = torch.empty_like(entries.features).uniform_(-1, 1) * (self.config.noise * self.scale)
        inputs = entries.features + noise
        loss = torch.zeros((), device=self.device)
        targets = self._logits(entries.targets, entries).softmax(-1)
        for _ in range(self.config.unroll):
            with self._autocast():
                predicted = self.head(inputs, entries.tokens, entries.positions)
            cross_entropy = _soft_cross_entropy(self._logits(predicted, entries), targets)
            regression = F.smooth_l1_loss(
                predicted[entries.valid].float() / self.scale, entries.targets[entries.valid] / self.scale
            )
            loss = loss + cross_entropy + self.config.regression_weight * regression
            inputs = _shifted(predicted.float(), inputs)
        loss = loss / self.config.unroll
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        return float(loss.detach())

    def _logits(self, features: Tensor, entries: "_Entries") -> Tensor:
        """Logits over the draft vocabulary at the valid entries, float32 `[n, V]`."""
        with self._autocast():
            return F.linear(features[entries.valid], self.head.lm_head).float()

    def _entries(self, batch: list[int]) -> "_Entries":
        tokens = padded(self.corpus, batch).to(self.device)
        lengths = self.corpus.lengths()[batch].to(self.device)
        features = torch.zeros(*tokens.shape, self.features.shape[1], device=self.device)
        for row, sequence in enumerate(batch):
            start, end = self.corpus.starts[sequence : sequence + 2].tolist()
            features[row, : end - start] = self.features[start:end].to(self.device, torch.float32)
        positions = torch.arange(tokens.shape[1] - 1, device=self.device)
        return _Entries(
            features[:, :-1],
            tokens[:, 1:],
            positions.expand(len(batch), -1),
            features[:, 1:],
            positions < (lengths - 1)[:, None],
        )

    def _steps(self) -> Iterator[list[int]]:
        for step in range(self.step, self.total_steps):
            epoch, place = divmod(step, len(self._training))
            generator = torch.Generator().manual_seed(self.config.seed + 1 + epoch)
            yield self._training[int(torch.randperm(len(self._training), generator=generator)[place])]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def _state_file(self) -> Path:
        return self.out / "training.pt"

    def _save(self) -> None:
        self.head.save(self.out, torch.bfloat16)
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "curve": self.curve,
            "run": self._run_description(),
        }
        part = self._state_file().with_suffix(".part")
        torch.save(state, part)
        part.rename(self._state_file())
        record = self._run_description() | {"parameters": self._parameters(), "curve": self.curve}
        (self.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        plot_curve(self.curve, self.out / "curve.png")

    def _resume(self) -> None:
        if not self._state_file().is_file():
            return
        state = torch.load(self._state_file(), map_location=self.device, weights_only=True)
        if state["run"] != self._run_description():
            raise invalid(
                f"{self.out} holds a run of another corpus or configuration: {state['run']}; "
                "resume it with the same options or train into an empty directory"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], state["curve"]

    def _run_description(self) -> dict[str, Any]:
        return asdict(self.config) | {
            "sequences": len(self.corpus),
            "tokens": self.corpus.tokens.numel(),
            "draft_vocab_size": len(self.head.vocabulary),
        }

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.head.parameters())


@dataclass(frozen=True, slots=True)
class _Entries:
    """Head entries of a padded batch of B sequences, N entries each."""

    features: Tensor
    """feature[i], float32 `[B, N, H]`."""
    tokens: Tensor
    """x[i+1], int64 `[B, N]`."""
    positions: Tensor
    """i, int64 `[B, N]`."""
    targets: Tensor
    """feature[i+1], float32 `[B, N, H]`."""
    valid: Tensor
    """Entries that are no padding, bool `[B, N]`."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean of -Σ p log q, whose gradient by the logits, q - p, needs no second pass over `[n, V]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        loss = -torch.vdot(p.flatten(), log_q.flatten()) / len(p)
        ctx.save_for_backward(log_q.exp_().sub_(p))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * (grad / len(difference)), None


def _soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    loss: Tensor = _SoftCrossEntropy.apply(logits, p)  # type: ignore[no-untyped-call]
    return loss


def _shifted(predicted: Tensor, inputs: Tensor) -> Tensor:
    """The features predicted for each entry by the one before it; the first keeps its input."""
    return torch.cat([inputs[:, :1], predicted[:, :-1].to(inputs.dtype)], 1)


def plot_curve(curve: list[dict[str, float]], file: Path) -> None:
    """Draw held-out agreement and cross-entropy against steps."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, 2), ("top1", "ce"), strict=True):
        for level in (1, 2):
            key = f"{name}_level{level}"
            axes.plot([p["step"] for p in curve], [p[key] for p in curve], label=f"level {level}")
        axes.set_xlabel("step")
        axes.set_title("top-1 agreement" if name == "top1" else "cross-entropy")
        axes.legend()
    figure.savefig(file, dpi=110)
