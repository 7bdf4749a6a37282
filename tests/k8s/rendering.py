"""What `kubectl kustomize` makes of an overlay, and the pods that follow from it."""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu-trial", "llama-8b", "llama-70b")
Object = dict[str, Any]


def render(directory: Path) -> list[Object]:
    """The objects of an overlay."""
    told = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return list(yaml.load_all(told.stdout, yaml.CSafeLoader))


def one(objects: Sequence[Object], kind: str, name: str) -> Object:
    """The object of a kind and name."""
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@dataclass(frozen=True)
class Pods:
    """Pods made after one template."""

    name: str
    template: Object
    least: int = 1
    most: int = 1
    group: Object | None = None
    """Of Ray, as KubeRay knows it."""

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        found: Object = container
        return found

    @property
    def hosts(self) -> int:
        """Pods that come and go together."""
        return (self.group or {}).get("numOfHosts", 1)


def pods(objects: Sequence[Object]) -> Iterator[Pods]:
    """All pods that come of the objects."""
    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield Pods(name, each["spec"]["template"])
        elif each["kind"] == "RayService":
            ray = each["spec"]["rayClusterConfig"]
            yield Pods("head", ray["headGroupSpec"]["template"], group=ray["headGroupSpec"])
            for group in ray["workerGroupSpecs"]:
                bounds = group["minReplicas"], group["maxReplicas"]
                yield Pods(group["groupName"], group["template"], *bounds, group)


def serve_config(objects: Sequence[Object]) -> Object:
    """What Serve is told."""
    config: Object = yaml.safe_load(one(objects, "RayService", "weald")["spec"]["serveConfigV2"])
    return config


def amount(quantity: str | int) -> float:
    """A quantity of Kubernetes as a number."""
    text = str(quantity)
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * units.get(unit, 1)
