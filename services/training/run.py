"""From a target and text to a trained head."""

from pathlib import Path

import torch

from services.engine.checkpoints import load_model, resolve
from services.engine.head import EagleHead, head_config
from services.engine.target import Target, embeddings
from services.gateway.tokenizer import Tokenizer
from services.training.corpus import draft_vocabulary, read_corpus
from services.training.distill import distill
from services.training.features import corpus_features
from services.training.trainer import Trainer, TrainingConfig


def train(
    target: str,
    corpus: list[Path],
    self_distill: int,
    out: Path,
    draft_vocab_size: int,
    max_length: int,
    device: torch.device,
    config: TrainingConfig,
) -> None:
    """Distil if asked to, read the corpus, compute the target's features, train.

    Everything is resumed from `out` when the same command runs again.
    """
    directory = resolve(target)
    tokenizer = Tokenizer.load(directory)
    out.mkdir(parents=True, exist_ok=True)
    if self_distill:
        dialogues = out / "self-distilled.jsonl.gz"
        distill(
            Target.load(directory, torch.bfloat16, device),
            tokenizer,
            self_distill,
            dialogues,
            seed=config.seed,
        )
        corpus = [*corpus, dialogues]
    sequences = read_corpus(corpus, tokenizer, max_length)
    print(f"{len(sequences)} sequences, {sequences.tokens.numel()} tokens")
    model = load_model(directory, torch.bfloat16, device, "sdpa")
    features = corpus_features(model, sequences, out / "features.bin", config.batch_tokens)
    vocabulary = None
    if draft_vocab_size:
        ends = sorted(tokenizer.eos_token_ids)
        vocabulary = draft_vocabulary(sequences.tokens, draft_vocab_size, ends).to(device)
        covered = torch.isin(sequences.tokens, vocabulary.cpu()).float().mean()
        print(f"the draft vocabulary of {len(vocabulary)} covers {covered:.1%} of the corpus")
    torch.manual_seed(config.seed)
    embedding, lm_head = (weight.float() for weight in embeddings(model))
    head = EagleHead(head_config(model.config), embedding, lm_head, vocabulary, "sdpa").to(device)
    head.start_from_features()
    Trainer(head, sequences, features, config, out).run()
