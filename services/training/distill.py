"""Self-distillation: the target writes its own training dialogues, so a private model needs no data set.

A user turn is sampled from the chat template's own prefix at temperature 1, half of them begun with a phrase
that spreads the topics; the answer is sampled at a temperature users choose.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from services.engine.target import Target
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import decode
from services.types.errors import invalid
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.verify.verifier import Verifier, pages_for

TEMPERATURES = (0.0, 0.0, 0.3, 0.6, 0.8, 1.0, 1.0)
OPENINGS = (
    *("", "", "", "", "", "", "", "", "", "", "", ""),
    *("Write a", "Write a Python function that", "Summarize the following", "Explain", "What is", "How do I"),
    *("Who was", "Give me", "Rewrite", "Solve", "If a", "John has"),
)
MAX_USER_TOKENS = 128
MAX_ANSWER_TOKENS = 320


def distill(
    target: Target, tokenizer: Tokenizer, dialogues: int, file: Path, *, rows: int = 64, seed: int = 0
) -> None:
    """Let the target write dialogues with itself into a `.jsonl.gz` corpus, continuing what is there.

    Args:
        target: the model that writes both turns.
        tokenizer: its tokenizer, with a chat template.
        dialogues: how many the file shall have in the end.
        file: one JSON object per line: `prompt_len`, `temperature` of the answer, `ids`.
        rows: dialogues written at a time.
        seed: of all sampling; dialogue i is the same whatever `rows` is.
    """
    before, between = template_around_user(tokenizer)
    longest = len(before) + MAX_USER_TOKENS + len(between) + MAX_ANSWER_TOKENS
    verifier = Verifier(target, num_pages=rows * pages_for(longest))
    done = sum(1 for _ in _lines(file)) if file.is_file() else 0
    bar = tqdm(total=dialogues, initial=done, desc="self-distillation", unit="dialogue", dynamic_ncols=True)
    for first in range(done, dialogues, rows):
        numbers = range(first, min(first + rows, dialogues))
        users = _turns(verifier, [_user_turn(n, seed, before, tokenizer) for n in numbers])
        answers = [_answer(n, seed, user, between, target) for n, user in zip(numbers, users, strict=True)]
        written = _turns(verifier, answers)
        with gzip.open(file, "at", encoding="utf-8") as lines:
            for session, ids in zip(answers, written, strict=True):
                record = {"prompt_len": len(session.prompt), "temperature": session.params.temperature}
                lines.write(json.dumps(record | {"ids": ids}) + "\n")
        bar.update(len(numbers))
    bar.close()


def template_around_user(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before a user's first message, and from its end to the answer.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the template changes or repeats the user's text.
    """
    marker = "4e0dUSER7a91"
    parts = tokenizer.render([{"role": "user", "content": marker}]).split(marker)
    if len(parts) != 2:
        raise invalid("the chat template does not hold a user's message once; give a corpus instead")
    return tokenizer.encode(parts[0], special=False), tokenizer.encode(parts[1], special=False)


def _lines(file: Path) -> Iterator[str]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from lines


def _user_turn(number: int, seed: int, before: Sequence[int], tokenizer: Tokenizer) -> Session:
    opening = random.Random(f"opening {seed} {number}").choice(OPENINGS)
    prompt = (*before, *tokenizer.encode(opening, special=False)) if opening else tuple(before)
    return Session(f"user-{number}", prompt, SamplingParams(max_tokens=MAX_USER_TOKENS), seed + 2 * number)


def _answer(number: int, seed: int, user: Sequence[int], between: Sequence[int], target: Target) -> Session:
    ended = user[:-1] if user[-1] in target.eos_token_ids else user
    temperature = random.Random(f"temperature {seed} {number}").choice(TEMPERATURES)
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=temperature)
    return Session(f"answer-{number}", (*ended, *between), params, seed + 2 * number + 1)


def _turns(verifier: Verifier, sessions: Sequence[Session]) -> list[list[int]]:
    """Prompt and output of every session, decoded in one batch."""
    ids = {session.id: list(session.prompt) for session in sessions}
    for step in decode(verifier, None, sessions):
        ids[step.session] += step.outcome.tokens
    return list(ids.values())
