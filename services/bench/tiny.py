"""A tiny random target and its head on disk, for what claims identity in float64 and needs no sense."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from services.engine.head import EagleHead
from services.local.models import quiet

TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|answer|>"
SPECIAL = ("<|end|>", "<|user|>", "<|answer|>")
LETTERS = "abcdefghijĠ."
VOCABULARY = len(SPECIAL) + len(LETTERS)


def write_tiny(
    directory: Path, context: int = 256, key_value_heads: int = 2, seed: int = 3
) -> tuple[Path, Path]:
    """A Llama of 15 tokens and so much context, and an undecided head: its wide trees often hold what comes.

    Returns:
        The directories of the target and of the head, made in `directory`.
    """
    target, head = directory / "target", directory / "head"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=context,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with quiet():
            model.save_pretrained(target)
        weights = model.model.embed_tokens.weight, model.lm_head.weight
        config.initializer_range = 0.02
        EagleHead(config, *weights).save(head, torch.float32)
    names = [*SPECIAL, *LETTERS]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    core.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return target, head
