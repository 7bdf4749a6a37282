"""Ray on several nodes of this machine, the application on it, and callers who compare what they get."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from services.bench.tiny import write_tiny
from services.gateway.tokenizer import Tokenizer
from services.local.models import load as load_models
from services.types.sampling import SamplingParams
from services.types.session import Session

PATIENCE_S = 240.0
PROMPT = "abcd"
SEEDS = range(6)
TOKENS = 160


@dataclass(frozen=True)
class Tiny:
    """A target of 15 tokens and an undecided head, and what the target says."""

    target: Path
    head: Path
    texts: Mapping[int, str]
    """Behind `PROMPT`, by seed; `TOKENS` tokens."""


def make_tiny(directory: Path, seed: int) -> Tiny:
    """A tiny model whose heads can be shared out to four ranks."""
    target, head = write_tiny(directory, 2048, 4, seed)
    models = load_models(str(target), None, speculative=False, device="cpu", dtype="float64")
    tokenizer, texts = Tokenizer.load(target), {}
    for choice in SEEDS:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        session = Session("plain", tuple(tokenizer.encode(PROMPT)), params, choice)
        texts[choice] = tokenizer.decode(
            [token for step in models.decode(session, None) for token in step.outcome.tokens]
        )
    return Tiny(target, head, texts)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny target and its head."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), 3)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Another one."""
    return make_tiny(tmp_path_factory.mktemp("other"), 4)


@dataclass
class Callers:
    """Threads that ask without a pause; an answer is a whole text of one of the models, or noted as wrong."""

    url: str
    models: Sequence[Tiny]
    count: int
    answered: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._leaving = threading.Event()
        self._seeds = itertools.cycle(SEEDS)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(self.count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join()

    def more(self, answers: int) -> None:
        """Wait until so many more have come."""
        wanted = self.answered + answers
        until(lambda: self.answered >= wanted or bool(self.wrong))
        assert not self.wrong

    def _ask(self) -> None:
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
            while not self._leaving.is_set():
                with self._lock:
                    seed = next(self._seeds)
                try:
                    text = said(client, self.url, seed)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    continue
                if text in [model.texts[seed] for model in self.models]:
                    self.answered += 1
                else:
                    self.wrong.append(text)


def said(client: httpx.Client, url: str, seed: int) -> str:
    """The text of a seed. Raises `ValueError` with the error that the gateway tells."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
    answer = client.post(f"{url}/v1/completions", json=asked)
    if answer.is_error:
        raise ValueError(answer.text)
    text: str = answer.json()["choices"][0]["text"]
    return text


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.1)


def processes(title: str) -> list[psutil.Process]:
    """Ray's workers with such a title."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][0].startswith(title):
            found.append(process)
    return found


@dataclass
class Running:
    """An application on a Ray of several nodes."""

    nodes: Any
    """`ray.cluster_utils.Cluster`."""
    store: Path
    verify_nodes: list[Any]
    url: str = ""

    def deploy(self, tiny: Tiny, **keys: Any) -> None:
        """Start it, or change it; verify processes go to nodes of verify, draft ones to those of draft."""
        from cluster.configuration import parse, read
        from cluster.launch import deploy, stored

        described = {
            "model": str(tiny.target),
            "speculative_model": str(tiny.head),
            "dtype": "float64",
            "drain": 5,
            "verify": {
                "kv_cache_memory": "64MiB",
                "resources": {"num_cpus": 0.1, "resources": {"verify": 1}},
            },
            "draft": {
                "speculative_budget": 60,
                "speculative_num_steps": 6,
                "kv_cache_memory": "16MiB",
                "resources": {"num_cpus": 0.1, "resources": {"draft": 1}},
            },
            "gateway": {
                "served_model_name": "tiny",
                "port": int(self.url.rpartition(":")[2] or 0),
                "resources": {"num_cpus": 0.1, "resources": {"gateway": 1}},
            },
        }
        config = parse(read(None, described).model_dump(mode="json"))
        self.url = deploy(stored(parse(_merged(config.model_dump(mode="json"), keys)), self.store))

    def replicas(self, role: str) -> list[dict[str, Any]]:
        """The running replicas of a role."""
        from cluster.overview import overview

        return [row for row in overview() if row["role"] == role and row["state"] == "running"]

    def addresses(self, role: str) -> set[str]:
        """Of the running replicas of a role."""
        return {row["address"] for row in self.replicas(role)}

    def lost(self, role: str, before: set[str]) -> None:
        """Wait until one of these is gone."""
        until(lambda: not before <= self.addresses(role))

    def settled(self, role: str, count: int) -> None:
        """Wait until so many replicas of a role run."""
        until(lambda: len(self.replicas(role)) == count)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merged(base.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A head with the gateway, a draft node and two verify nodes; nothing is deployed yet."""
    from ray import serve
    from ray.cluster_utils import Cluster

    from cluster.launch import connected
    from services.sessions.embedded import embedded

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"gateway": 2}})
    try:
        nodes.add_node(num_cpus=1, resources={"draft": 3})
        verify = [nodes.add_node(num_cpus=1, resources={"verify": 2}) for _ in range(2)]
        with embedded(tmp_path_factory.mktemp("store")) as redis, connected(nodes.address):
            yield Running(nodes, redis.file, verify)
            # Serve remembers its controller, also when Ray has ended; the next module has a Ray of its own.
            serve.shutdown()
    finally:
        nodes.shutdown()


@pytest.fixture(scope="session")
def callers() -> Callable[..., AbstractContextManager[Callers]]:
    """`callers(url, models, count)` ask as long as the context lasts."""
    return Callers


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """`eventually(holds)` waits until it does."""
    return until


@pytest.fixture(scope="session")
def workers() -> Callable[[str], list[psutil.Process]]:
    """`workers(title)` are Ray's workers with such a title."""
    return processes
