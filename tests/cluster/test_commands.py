"""`weald serve` as a process, and the commands that look at what it runs and change it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services.telemetry.file import read
from services.telemetry.names import Attribute
from services.telemetry.requests import requests

ROLES = ("draft", "gateway", "verify")
pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-c", "from cluster.command import main; main()")
WITHIN_S = 240


def weald(*arguments: object, status: int = 0) -> str:
    """What a command prints, which ends with this exit status."""
    ended = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=WITHIN_S)
    assert ended.returncode == status, ended.stderr
    return ended.stdout + ended.stderr


def curl(url: str, *options: str) -> bytes:
    """What is answered there."""
    asked = ["curl", "--silent", "--noproxy", "*", url, *options]
    return subprocess.run(asked, capture_output=True, check=True, timeout=WITHIN_S).stdout


@dataclass(frozen=True)
class Served:
    """A `weald serve` that runs."""

    process: "subprocess.Popen[str]"
    ray: str
    url: str

    def replicas(self) -> list[dict[str, Any]]:
        """As `weald status` lists them."""
        found: list[dict[str, Any]] = json.loads(weald("status", "--address", self.ray, "--json"))["replicas"]
        return found


@contextmanager
def serving(file: Path) -> Iterator[Served]:
    """`weald serve` until the block ends; then it must end by itself and leave no process."""
    process = subprocess.Popen([*COMMAND, "serve", "--config", str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        try:
            words = process.stdout.readline().replace(",", "").split()
            yield Served(process, words[4], words[-1])
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WITHIN_S) == 0
            assert not psutil.wait_procs(started, WITHIN_S)[1]
        finally:
            process.kill()


def traces_of(description: Path) -> Path:
    """Where a cluster described in this file tells of its requests."""
    return description.with_suffix(".jsonl")


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    """The description of a small cluster."""
    keys = {
        "model": str(tiny.target),
        "speculative_model": str(tiny.head),
        "dtype": "float64",
        "verify": {"kv_cache_memory": "64MiB", "resources": {"num_cpus": 0.1}},
        "draft": {
            "speculative_budget": 60,
            "speculative_num_steps": 6,
            "kv_cache_memory": "16MiB",
            "resources": {"num_cpus": 0.1},
        },
        "gateway": {"served_model_name": "tiny", "port": 0, "resources": {"num_cpus": 0.1}},
    }
    file = tmp_path_factory.mktemp("described") / "weald.yaml"
    keys["telemetry"] = {"trace_file": str(traces_of(file)), "log_format": "json", "log_level": "info"}
    file.write_text(yaml.safe_dump(keys))
    return file


def test_one_command_serves_and_others_show_it_and_scale_it(
    described: Path, tiny: Any, eventually: Callable[..., None]
) -> None:
    with serving(described) as served:
        body = {"model": "tiny", "prompt": "abcd", "max_tokens": 160, "seed": 1, "ignore_eos": True}
        sent = "--header", "Content-Type: application/json", "--data", json.dumps(body)
        answer = json.loads(curl(f"{served.url}/v1/completions", *sent))
        assert answer["choices"][0]["text"] == tiny.texts[1]
        targets = ["curl", "--silent", "--noproxy", "*", f"{served.url}/metrics/targets"]
        listed = json.loads(subprocess.run(targets, capture_output=True, check=True).stdout)
        for one in listed:
            told = ["curl", "--silent", "--noproxy", "*", f"http://{one['targets'][0]}/metrics"]
            of_gateway = one["labels"]["service"] == "weald-gateway"
            own = "weald_num_requests_running" if of_gateway else "weald_kv_cache_usage_perc"
            assert own in subprocess.run(told, capture_output=True, check=True, text=True).stdout
        assert sorted(one["labels"]["service"] for one in listed) == [f"weald-{role}" for role in ROLES]
        replicas = served.replicas()
        assert [(row["role"], row["state"]) for row in replicas] == [
            ("draft", "running"),
            ("gateway", "running"),
            ("verify", "running"),
        ]
        assert {row["node"] for row in replicas} == {os.uname().nodename}
        weald("scale", "draft", 2, "--address", served.ray)
        assert [row["role"] for row in served.replicas()].count("draft") == 2
        assert [row["address"] for row in served.replicas() if row["role"] == "verify"] == [
            row["address"] for row in replicas if row["role"] == "verify"
        ]
        assert "draft" in weald("status", "--address", served.ray)
        refused = weald("scale", "draft", "many", "--address", served.ray, status=1)
        assert "write 2, or 1:4" in refused
        # What cannot be held is refused before anything changes.
        refused = weald("scale", "verify", 1000, "--address", served.ray, status=1)
        assert "verify" in refused
        assert len(served.replicas()) == 4
    (request,) = requests(read(traces_of(described)))
    assert {process.split()[0] for process in request.processes} == {f"weald-{role}" for role in ROLES}
    assert sum(round.count(Attribute.COMMITTED) for round in request.rounds) == 160


def test_everything_wrong_with_a_description_is_told_at_once(described: Path, tmp_path: Path) -> None:
    keys = yaml.safe_load(described.read_text())
    file = tmp_path / "weald.yaml"
    file.write_text(
        yaml.safe_dump(keys | {"speculative_model": "/nowhere", "verify": {"tensor_parallel_size": 3}})
    )
    told = [line for line in weald("check", "--config", file, status=1).splitlines() if line.startswith("- ")]
    assert any("speculative_model" in line for line in told)
    assert any("tensor_parallel_size" in line for line in told)
    assert "nothing is wrong" in weald("check", "--config", described)
    file.write_text(yaml.safe_dump(keys | {"verify": {"max_seqs": 3}, "modell": "a"}))
    refused = weald("check", "--config", file, status=1)
    assert "verify.max_seqs" in refused
    assert "modell" in refused


def test_commands_for_a_running_application_say_how_to_start_one_where_there_is_none() -> None:
    for arguments in (("status",), ("scale", "draft", 2)):
        refused = weald(*arguments, "--address", "127.0.0.1:1", status=1)
        assert refused.startswith("weald: there is no Ray at 127.0.0.1:1")
