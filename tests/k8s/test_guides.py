"""What the guides say is what files and figures say."""

import json
import re
import shutil
from typing import Any

import pytest
import yaml

from cluster.configuration import parse
from services.engine.pages import PAGE_SIZE
from tests.k8s.checks import CARD_BYTES, SECRETS, Overlay, room
from tests.k8s.rendering import K8S, OVERLAYS, ROOT, one, render

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
GUIDE = (K8S / "README.md").read_text()
WORKED = (ROOT / "docs/70b.md").read_text()
FIGURES = json.loads((ROOT / "docs/figures/paper.json").read_text())
TARGET = "Llama-3.3-70B"


def rows(kind: str) -> list[dict[str, Any]]:
    """Of the target."""
    return [row for row in FIGURES[kind] if row["target"] == TARGET]


def table(*cells: Any) -> str:
    """A row as the guides write it."""
    shown = (
        cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:.2f}"
        for cell in cells
    )
    return f"| {' | '.join(shown)} |"


def test_the_guide_makes_every_secret_with_every_key() -> None:
    made = {
        name: set(re.findall(r"--from-literal=(\w+)=", command))
        for name, command in re.findall(r"create secret generic (\S+) ((?:.*\\\n)*.*)", GUIDE, re.MULTILINE)
    }
    assert made == SECRETS


def test_the_guide_names_files_components_alerts_and_objects_that_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", GUIDE):
        assert (K8S / path).resolve().exists(), path
    for path in re.findall(r"apply -[kf] (k8s/[^\s`]+)", GUIDE):
        assert (ROOT / path).exists(), path
    alerts = yaml.safe_load((K8S / "components/monitoring/alerts.yaml").read_text())
    rules = alerts["spec"]["groups"][0]["rules"]
    assert set(re.findall(r"`(Weald[A-Z]\w+)`", GUIDE)) == {rule["alert"] for rule in rules}
    components = {each.name for each in (K8S / "components").iterdir()}
    assert components <= set(re.findall(r"[\w-]+", GUIDE))
    objects = render(K8S / "overlays/llama-70b")
    kinds = {
        "deploy": "Deployment",
        "job": "Job",
        "service": "Service",
        "rayservice": "RayService",
        "networkpolicy": "NetworkPolicy",
    }
    named = re.findall(r"\b(deploy|job|service|rayservice)/([\w-]+)", GUIDE)
    deleted = re.findall(r"delete (job|networkpolicy) ([\w-]+)", GUIDE)
    assert len(named) >= 4
    for kind, name in [*named, *deleted]:
        one(objects, kinds[kind], name)


def test_the_worked_plan_has_the_figures_of_the_plan() -> None:
    told = re.sub(r"\*\*", "", WORKED)
    (rank,) = rows("ranks")
    config = parse(yaml.safe_load((K8S / "overlays/llama-70b/weald.yaml").read_text()))
    token = (rank["page_keys_and_values"] + rank["page_features"]) // PAGE_SIZE
    tokens = config.verify.kv_cache_memory // token
    numbers = [
        f"{rank['parameters']:,} parameters: {2 * rank['parameters'] / 1e9:.1f} GB",
        f"{rank['weights_of_a_rank'] / 1e9:.2f} GB of weights",
        f"{CARD_BYTES / 1e9:.0f} GB",
        f"{(CARD_BYTES - rank['weights_of_a_rank']) / 1e9:.0f} GB, could be pages",
        f"{config.verify.kv_cache_memory / 2**30:.0f} GiB ({config.verify.kv_cache_memory / 1e9:.1f} GB)",
        f"leaves {(CARD_BYTES - rank['weights_of_a_rank'] - config.verify.kv_cache_memory) / 1e9:.1f} GB",
        f"{token:,} bytes of each rank",
        f"{tokens:,} tokens: {tokens // (config.verify.max_model_len or 1)} sessions",
        f"{tokens // config.verify.max_num_seqs:,} tokens each",
        f"head's {rank['head'] / 1e9:.2f} GB",
        f"LM head's {rank['LM_head'] / 1e9:.2f} GB",
    ]
    reduce, *_ = [row for row in rows("collectives") if row["collective"] == "all-reduce"]
    steps = {row["nodes"]: row for row in rows("steps")}
    numbers += [
        f"{reduce['count']} all-reduces (two a layer, one for the embedding)",
        f"{reduce['bytes_of_a_rank']:,} bytes from each rank",
        f"{reduce['between_hosts'] / 1e6:.1f} MB between the hosts",
        f"{steps[1]['model_collectives']:.2f} of the step's {steps[1]['step']:.2f} ms",
    ]
    for nodes in (1, 8, 16, 32, 60):
        row = steps[nodes]
        numbers.append(table(nodes, row["compute"], row["model_collectives"], row["control"], row["step"]))
    for row in rows("placements"):
        shown = (row[key] for key in ("plain_ms", "D", "k", "m", "τ", "round_ms", "×_plain"))
        numbers.append(table(row["slowest_link"], *shown))
    best: dict[str, dict[str, Any]] = {}
    for row in rows("cards"):
        if row["card"] not in best or row["tokens_per_s"] > best[row["card"]]["tokens_per_s"]:
            best[row["card"]] = row
    for card, row in best.items():
        keys = ("D", "k", "m", "τ", "pass_ms", "round_ms", "tokens_per_s", "×_plain")
        numbers.append(table(card, row["draft_vocabulary"], *(row[key] for key in keys)))
    (link,) = rows("links")
    numbers.append(
        f"{link['draft_to_verify']} bytes up, features and tokens are {link['verify_to_draft']:,} bytes down"
    )
    numbers.append(f"plain decoding has {rows('choice')[0]['plain_tokens_per_s']:.2f}")
    missing = [number for number in numbers if number not in told]
    assert missing == []


def test_the_worked_plan_has_the_figures_of_the_simulation() -> None:
    simulated = json.loads((ROOT / "docs/figures/simulate.json").read_text())["70b"]
    rates: dict[tuple[int, str], float] = {
        (row["sessions"], row["mode"]): row["tokens_per_s"] for row in simulated["rows"]
    }
    gains = {n: rates[n, "auto"] / rates[n, "plain"] for n, mode in rates if mode == "plain"}
    assert (
        f"{gains[1]:.2f} × plain with one, {gains[4]:.2f} × with four, {gains[8]:.2f} × with eight" in WORKED
    )
    assert all(abs(gains[n] - 1) < 0.02 for n in gains if n >= 16)
    assert {row["draft_replicas"] for row in simulated["draft_replicas"]} == {1}


def test_the_worked_plan_quotes_the_planner() -> None:
    directory = K8S / "overlays/llama-70b"
    overlay = Overlay("llama-70b", yaml.safe_load((directory / "weald.yaml").read_text()), render(directory))
    ray = one(overlay.objects, "RayService", "weald")["spec"]["rayClusterConfig"]
    limits = ray["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpu"] = 2
    (quoted,) = re.findall(r"^> (.*)$", WORKED, re.MULTILINE)
    assert quoted in list(room(overlay))


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_overlay_has_a_digest_that_nobody_built(name: str) -> None:
    (image,) = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())["images"]
    assert image["digest"] == f"sha256:{'0' * 64}"
