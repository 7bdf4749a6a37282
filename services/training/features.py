"""Features of a whole corpus, computed once by prefill and kept in a file."""

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from services.training.corpus import Sequences


def corpus_features(model: PreTrainedModel, corpus: Sequences, file: Path, batch_tokens: int) -> Tensor:
    """The target's features at every token of the corpus, bfloat16 `[N, H]`, backed by `file`.

    Resumes where an interrupted run over the same corpus stopped: a file beside it counts finished batches.

    Args:
        model: a plain transformers causal LM; its own causal attention is used.
        corpus: the sequences, each seen alone.
        file: where the features are kept.
        batch_tokens: tokens of a forward pass, padding included.
    """
    hidden = model.config.get_text_config().hidden_size
    total = corpus.tokens.numel()
    features = torch.from_file(str(file), shared=True, size=total * hidden, dtype=torch.bfloat16).view(
        total, hidden
    )
    progress_file = file.with_suffix(".done")
    same = hashlib.sha256(corpus.tokens.numpy().tobytes() + corpus.starts.numpy().tobytes()).hexdigest()
    key = f"{same} {batch_tokens}"
    before, _, finished = (
        progress_file.read_text().rpartition(" ") if progress_file.is_file() else ("", "", "0")
    )
    done = int(finished) if before == key else 0
    batches = batches_by_length(corpus, batch_tokens)
    bar = tqdm(total=total, unit="tok", desc="features", dynamic_ncols=True)
    for number, batch in enumerate(batches):
        lengths = corpus.lengths()[batch]
        bar.update(int(lengths.sum()))
        if number < done:
            continue
        hidden_states = _prefill(model, padded(corpus, batch))
        for row, sequence in enumerate(batch):
            start, end = corpus.starts[sequence : sequence + 2].tolist()
            features[start:end] = hidden_states[row, : end - start].to("cpu", torch.bfloat16)
        progress_file.write_text(f"{key} {number + 1}")
    bar.close()
    return features


def batches_by_length(corpus: Sequences, batch_tokens: int) -> list[list[int]]:
    """Sequences of like length together, at most `batch_tokens` padded tokens each, but at least one."""
    order = corpus.lengths().sort(descending=True, stable=True).indices.tolist()
    lengths = corpus.lengths().tolist()
    batches: list[list[int]] = []
    for sequence in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


def padded(corpus: Sequences, batch: list[int]) -> Tensor:
    """Token ids of the sequences, padded with 0 behind their ends, int64 `[len(batch), longest]`."""
    rows = [corpus.tokens[corpus.starts[s] : corpus.starts[s + 1]] for s in batch]
    longest = max(len(row) for row in rows)
    return torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])


@torch.inference_mode()
def _prefill(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    hidden: Tensor = decoder(input_ids=tokens.to(model.device), use_cache=False).last_hidden_state
    return hidden
