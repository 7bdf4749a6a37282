"""`weald generate`, on a tiny random model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import Result

from services.engine.head import EagleHead

Generate = Callable[..., dict[str, Any]]
Weald = Callable[..., Result]
Spawn = Callable[..., subprocess.CompletedProcess[str]]

WHOLE = ("--speculative-budget", 60, "--speculative-num-steps", 6)
LONG = ("--prompt", "abc", "--max-tokens", 40, "--ignore-eos", "--seed", 7)
END = 0
"""The end-of-sequence token."""


def test_the_process_prints_one_json_object_and_nothing_else(spawn: Spawn, checkpoints: Any) -> None:
    finished = spawn("generate", *checkpoints.options("--json", *LONG))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("\n") == 1
    printed = json.loads(finished.stdout)
    assert list(printed) == [
        "text",
        "token_ids",
        "finish_reason",
        "seed",
        "session",
        "rounds",
        "tau",
        "nodes_drafted",
        "nodes_verified",
        "recoveries",
        "timings",
    ]
    assert printed["text"] == checkpoints.tokenizer.decode(printed["token_ids"])
    assert len(printed["token_ids"]) == 40
    assert (printed["finish_reason"], printed["seed"]) == ("length", 7)
    assert (printed["session"], printed["recoveries"]) == (None, 0)
    timings = printed["timings"]
    assert list(timings) == ["draft_s", "verify_s", "total_s"]
    assert 0 < timings["draft_s"] + timings["verify_s"] <= timings["total_s"]


def test_the_process_streams_the_text_and_tells_its_figures_apart_from_it(
    spawn: Spawn, generate: Generate, checkpoints: Any
) -> None:
    finished = spawn("generate", *checkpoints.options(*LONG, *WHOLE))
    expected = generate(*LONG)
    assert finished.returncode == 0
    assert finished.stdout == expected["text"] + "\n"
    assert finished.stderr.count("\n") == 1
    assert finished.stderr.startswith(f"40 tokens, {expected['rounds']} rounds, τ {expected['tau']:.2f}, ")
    assert finished.stderr.endswith("seed 7\n")


def test_the_process_tells_an_error_in_one_sentence_and_fails(spawn: Spawn) -> None:
    finished = spawn("generate", "--model", "./nowhere", "--speculative", "off", "--prompt", "a")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("weald: no model at './nowhere': name a directory")
    assert finished.stderr.count("\n") == 1


def test_help_for_the_command_is_shown_without_torch_and_transformers(spawn: Spawn) -> None:
    loaded = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
    finished = spawn("generate", "--help", prelude=loaded)
    assert finished.returncode == 0
    assert "--speculative-budget" in finished.stdout
    assert not {"torch", "transformers"} & set(finished.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("sampling", [("--temperature", 0), ("--temperature", 1), ("--top-p", 0.8)])
def test_the_tokens_are_the_same_whatever_drafts_them(generate: Generate, sampling: tuple[object]) -> None:
    plain = generate(*LONG, *sampling, "--speculative", "off")
    assert len(plain["token_ids"]) == 40
    for shape in ("dynamic", "static", "chain"):
        drafted = generate(*LONG, *sampling, "--tree", shape)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["text"] == plain["text"]


def test_drafts_are_accepted_and_counted(generate: Generate) -> None:
    figures = generate(*LONG)
    assert figures["rounds"] < 39
    assert figures["tau"] >= 39 / figures["rounds"] > 1
    assert figures["rounds"] < figures["nodes_verified"] <= figures["nodes_drafted"]
    assert figures["nodes_drafted"] == figures["rounds"] * 59


def test_without_speculation_every_round_is_a_plain_step(generate: Generate) -> None:
    figures = generate(*LONG, "--speculative", "off")
    counted = {key: figures[key] for key in ("rounds", "tau", "nodes_drafted", "nodes_verified")}
    assert counted == {"rounds": 39, "tau": None, "nodes_drafted": 0, "nodes_verified": 0}


def test_the_options_of_the_tree_are_its_sizes(generate: Generate) -> None:
    dynamic = generate(*LONG, "--speculative-budget", 7, "--speculative-eagle-topk", 3)
    assert dynamic["nodes_drafted"] == dynamic["rounds"] * 6
    chain = generate(*LONG, "--tree", "chain", "--speculative-num-steps", 4)
    assert chain["nodes_drafted"] == chain["rounds"] * 4
    static = generate(*LONG, "--tree", "static")
    assert static["nodes_drafted"] == static["rounds"] * 25


@pytest.mark.parametrize("speculative", ["on", "off"])
def test_a_stop_string_cuts_the_text_right_before_it(generate: Generate, speculative: str) -> None:
    whole = generate(*LONG)
    text, stop = whole["text"], whole["text"][20:23]
    stopped = generate(*LONG, "--stop", "zz", "--stop", stop, "--speculative", speculative)
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    count = len(stopped["token_ids"])
    assert stopped["token_ids"] == whole["token_ids"][:count]
    assert 0 < count < 40
    assert whole["token_ids"][count - 1] >= 3, "the last token has text: it completed the stop string"


@pytest.mark.parametrize("speculative", ["on", "off"])
def test_the_end_token_is_among_the_tokens_but_not_in_the_text(generate: Generate, speculative: str) -> None:
    options = ("--prompt", "abc", "--seed", 7, "--logit-bias", f"{END}=100", "--min-tokens", 5)
    ended = generate(*options, "--speculative", speculative)
    assert len(ended["token_ids"]) == 6
    assert ended["token_ids"].index(END) == 5
    assert ended["finish_reason"] == "stop"
    assert "<|end|>" not in ended["text"]


def test_a_stop_token_ends_the_text_although_the_end_of_sequence_is_ignored(generate: Generate) -> None:
    whole = generate(*LONG)
    stop = next(token for token in whole["token_ids"][10:] if token >= 3)
    stopped = generate(*LONG, "--stop-token-id", stop)
    count = whole["token_ids"].index(stop) + 1
    assert stopped["token_ids"] == whole["token_ids"][:count]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["text"]) < len(whole["text"])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_as_many_tokens_are_made_as_were_asked_for(generate: Generate, count: int) -> None:
    made = generate(*LONG, "--max-tokens", count)
    assert len(made["token_ids"]) == count
    assert made["finish_reason"] == "length"
    assert made["rounds"] == max(count - 1, 0)
    assert made["tau"] is None, "what room is left below a root takes no tree"


def test_the_context_is_filled_to_its_end_and_not_beyond(generate: Generate) -> None:
    filled = generate(*LONG, "--prompt", "ab" * 120, "--max-tokens", 1000)
    assert len(filled["token_ids"]) == 256 - 240
    assert filled["finish_reason"] == "length"


def test_a_seed_is_drawn_and_told_and_gives_the_same_text_again(generate: Generate) -> None:
    options = ("--prompt", "abc", "--max-tokens", 40, "--ignore-eos")
    first, second = generate(*options), generate(*options)
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]
    assert generate(*options, "--seed", first["seed"])["token_ids"] == first["token_ids"]


@pytest.mark.parametrize(
    "sampling",
    [
        ("--top-k", 1),
        ("--min-p", 1),
        ("--frequency-penalty", 2),
        ("--presence-penalty", 2),
        ("--repetition-penalty", 3),
        ("--logit-bias", "4=-inf", "--logit-bias", "5=8"),
    ],
)
def test_each_sampling_option_reaches_the_target(generate: Generate, sampling: tuple[object, ...]) -> None:
    assert generate(*LONG, *sampling)["token_ids"] != generate(*LONG)["token_ids"]


@pytest.mark.parametrize("options", [(), ("--prompt", "-")])
def test_the_prompt_comes_from_standard_input_less_its_last_newline(
    generate: Generate, options: tuple[str, ...]
) -> None:
    sampling = ("--seed", 7, "--max-tokens", 12)
    piped = generate(*sampling, *options, input="ab cd\n")
    assert piped["token_ids"] == generate(*sampling, "--prompt", "ab cd")["token_ids"]


def test_chat_puts_the_prompt_into_the_template(generate: Generate) -> None:
    sampling = ("--seed", 7, "--max-tokens", 12)
    said = generate(*sampling, "--chat", "--prompt", "ab")
    assert said["token_ids"] == generate(*sampling, "--prompt", "<|user|>ab<|answer|>")["token_ids"]
    assert said["token_ids"] != generate(*sampling, "--prompt", "ab")["token_ids"]


def test_each_round_is_drawn_with_its_accepted_path_and_then_the_text(
    weald: Weald, generate: Generate, checkpoints: Any
) -> None:
    drawn = weald("generate", *checkpoints.options(*LONG, *WHOLE, "--show-tree"))
    expected = generate(*LONG)
    assert drawn.exit_code == 0
    lines = drawn.stdout.splitlines()
    assert lines[-1] == expected["text"]
    titles = [line for line in lines if line.startswith("round ")]
    assert len(titles) == expected["rounds"]
    assert titles[-1] == f"round {expected['rounds']}, τ {expected['tau']:.2f}"
    marks = {mark: sum(line.endswith(mark) for line in lines) for mark in ("✓", "bonus")}
    assert marks["✓"] > 0
    assert marks["✓"] + marks["bonus"] == len(expected["token_ids"]) - 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--beam", "3"), "No such option: --beam"),
        (("--tree", "round"), "--tree"),
        (("--dtype", "int8"), "--dtype"),
        (("--speculative", "maybe"), "--speculative"),
        (("--seed", "dice"), "--seed"),
        (("--logit-bias", "4"), "write a token id and a number"),
        (("--logit-bias", "a=1"), "write a token id and a number"),
        (("--json", "--show-tree"), "use one of --json and --show-tree"),
    ],
)
def test_a_wrong_option_is_named_and_the_exit_code_is_two(
    weald: Weald, options: tuple[str, ...], complaint: str
) -> None:
    finished = weald("generate", "--model", "any", "--prompt", "abc", *options)
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert complaint in finished.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ("--temperature", "-1"),
            "temperature must be 0 (greedy) or a finite number from 1e-05 on, got -1.0",
        ),
        (("--speculative-budget", "65"), "the tree budget must be in [1, 64], got 65"),
        (("--device", "abacus"), "there is no device 'abacus' here"),
        (("--device", "meta"), "there is no device 'meta' here"),
        (("--logit-bias", "99=1"), "token 99 is not in the target's vocabulary of 15"),
        (("--stop", ""), "a stop string must not be empty"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a" * 256), "shorten the prompt"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence_and_the_exit_code_is_one(
    weald: Weald, checkpoints: Any, options: tuple[str, ...], complaint: str
) -> None:
    finished = weald("generate", *checkpoints.options("--prompt", "abc", *options))
    assert (finished.exit_code, finished.stdout) == (1, "")
    assert finished.stderr.startswith("weald: ")
    assert finished.stderr.count("\n") == 1
    assert complaint in finished.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--endpoint", "a:1", "--prompt", "abc"), "leave --prompt out with --resume"),
        (("--endpoint", "a:1", "--chat"), "leave --chat out with --resume"),
        (("--endpoint", "a:1", "--seed", "7"), "leave --seed out with --resume"),
        (("--endpoint", "a:1", "--temperature", "1"), "leave --temperature out with --resume"),
        (("--endpoint", "a:1", "--stop-token-id", "1"), "leave --stop-token-id out with --resume"),
        ((), "--resume needs draft replicas"),
    ],
)
def test_what_cannot_be_said_of_a_session_that_goes_on_is_named(
    weald: Weald, options: tuple[str, ...], complaint: str
) -> None:
    finished = weald("generate", "--model", "any", "--resume", "id", *options)
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert complaint in " ".join(finished.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--endpoint", "a:1", "--resume", "id:x:y"), "'id:x:y' names no session"),
        (("--endpoint", "a:1", "--prompt", ""), "the prompt is empty"),
        (("--store", "memory://", "--prompt", "abc"), "memory:// is known to one process alone"),
        (("--store", "etcd://a", "--prompt", "abc"), "a store is memory://, redis://"),
    ],
)
def test_what_no_draft_replica_can_do_is_told_in_a_sentence(
    weald: Weald, checkpoints: Any, options: tuple[str, ...], complaint: str
) -> None:
    finished = weald("generate", *checkpoints.options(*options))
    assert (finished.exit_code, finished.stdout) == (1, "")
    assert finished.stderr.startswith("weald: ")
    assert finished.stderr.count("\n") == 1
    assert complaint in finished.stderr


def test_speculation_without_a_head_says_how_to_go_on(weald: Weald, checkpoints: Any) -> None:
    finished = weald("generate", "--model", checkpoints.target, "--prompt", "abc")
    assert finished.exit_code == 1
    assert "--speculative-model" in finished.stderr
    assert "--speculative off" in finished.stderr


def test_a_head_of_another_model_is_refused_with_both_sizes(
    weald: Weald, checkpoints: Any, tmp_path: Path
) -> None:
    config = LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    EagleHead(config, torch.zeros(9, 32), torch.zeros(9, 32)).save(tmp_path, torch.float32)
    finished = weald("generate", *checkpoints.options("--prompt", "abc", "--speculative-model", tmp_path))
    assert finished.exit_code == 1
    assert "the head's vocabulary has 9 tokens, the target's has 15" in finished.stderr


def test_a_prompt_on_standard_input_must_be_utf_8(weald: Weald, checkpoints: Any) -> None:
    finished = weald("generate", *checkpoints.options(), input=b"\xff")
    assert (finished.exit_code, finished.stdout) == (1, "")
    assert "standard input is not UTF-8" in finished.stderr
