"""Every overlay, rendered: schemas, policies, what must agree across files; and mistakes that are found."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.checks import Overlay, definitions, is_built_in, misshapen, wrong
from tests.k8s.rendering import K8S, OVERLAYS, ROOT, Object, one, pods, render

if shutil.which("kubectl") is None:
    pytest.skip("kubectl is not here, which renders the overlays", allow_module_level=True)

CRDS = Path(os.environ["CRDS"]).absolute() if os.environ.get("CRDS") else None
if CRDS and not any(CRDS.glob("*.yaml")):
    raise pytest.UsageError(f"CRDS={CRDS} has no .yaml file; name the directory of KubeRay's release files")
CHECKOV = ROOT / ".checkov/bin/checkov"
LET_BE = {
    "CKV_K8S_15": "an image by its digest is the same whenever it is pulled",
    "CKV_K8S_43": "those of others are pinned by version: their digests are for whoever has looked at them",
}
"""Rules of checkov that do not hold here."""
AUTOSCALER = "CKV_K8S_38"
"""The head has a token of Kubernetes where it scales."""


@pytest.fixture(scope="session")
def rendered() -> Callable[[str], Overlay]:
    """`rendered(name)` is an overlay; rendered once."""
    known: dict[str, Overlay] = {}

    def of(name: str) -> Overlay:
        if name not in known:
            directory = K8S / "overlays" / name
            known[name] = Overlay(
                name, yaml.safe_load((directory / "weald.yaml").read_text()), render(directory)
            )
        return known[name]

    return of


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_is_wrong_with_an_overlay(name: str, rendered: Callable[[str], Overlay]) -> None:
    assert wrong(rendered(name), CRDS) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_serve_is_told_was_written_by_the_command_that_it_names(name: str) -> None:
    directory = K8S / "overlays" / name
    told = subprocess.run(
        [Path(sys.executable).with_name("weald"), "manifest", "--config", "weald.yaml"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (directory / "serve.yaml").read_text() == told.stdout


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_definitions_of_kuberay_know_what_is_asked_of_it(
    name: str, rendered: Callable[[str], Overlay]
) -> None:
    if ("ray.io/v1", "RayService") not in definitions(CRDS):
        pytest.skip("KubeRay's definitions are not here: make k8s CRDS=DIR, with the CRDs of its release")
    own = [each for each in rendered(name).objects if each["kind"] == "RayService"]
    assert len(own) == 1
    assert list(misshapen(own, CRDS)) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_definitions_of_other_operators_know_what_is_asked_of_them(
    name: str, rendered: Callable[[str], Overlay]
) -> None:
    defined = definitions(CRDS)
    foreign = {(e["apiVersion"], e["kind"]) for e in rendered(name).objects if not is_built_in(e)}
    if unknown := sorted(kind for version, kind in foreign if (version, kind) not in defined):
        pytest.skip(f"no schema is here of {', '.join(unknown)}: put the CRDs into the directory of CRDS=DIR")
    assert list(misshapen([e for e in rendered(name).objects if not is_built_in(e)], CRDS)) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_checkov_finds_nothing(name: str, rendered: Callable[[str], Overlay], tmp_path: Path) -> None:
    if not CHECKOV.exists():
        pytest.skip("checkov is not here: make k8s installs it, in an environment of its own")
    overlay = rendered(name)
    # Of a RayService it knows nothing, of pods it does.
    ray = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": of.name, "namespace": "weald", "labels": of.labels},
        }
        | {"spec": of.spec}
        for of in pods(overlay.objects)
        if of.group
    ]
    known = [each for each in overlay.objects if is_built_in(each)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([*known, *ray]))
    told = subprocess.run(
        [CHECKOV, "-f", "all.yaml", "--framework", "kubernetes", "-o", "json", "--quiet", "--skip-download"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(told.stdout)
    assert found["summary"]["passed"] > 200
    assert found["summary"]["parsing_errors"] == 0
    failed = {(each["check_id"], each["resource"]) for each in found["results"]["failed_checks"]}
    scales = (AUTOSCALER, "Pod.weald.head")
    assert {each for each in failed if each[0] not in LET_BE} - {scales} == set()
    assert (scales in failed) == any("autoscaler" in e["metadata"]["name"] for e in overlay.objects)


def test_every_overlay_and_every_component_is_looked_at() -> None:
    assert {each.name for each in (K8S / "overlays").iterdir()} == set(OVERLAYS)
    included = {
        Path(component).name
        for name in OVERLAYS
        for component in yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text()).get(
            "components", ()
        )
    }
    assert included == {each.name for each in (K8S / "components").iterdir()}


def ray(overlay: Overlay) -> Object:
    """Its cluster."""
    cluster: Object = one(overlay.objects, "RayService", "weald")["spec"]["rayClusterConfig"]
    return cluster


def group(overlay: Overlay, name: str) -> Any:
    """A group of workers."""
    (found,) = [each for each in ray(overlay)["workerGroupSpecs"] if each["groupName"] == name]
    return found


def container(overlay: Overlay, name: str) -> Any:
    """The container of a group."""
    return group(overlay, name)["template"]["spec"]["containers"][0]


def a_service_names_a_port_that_nobody_has(overlay: Overlay) -> None:
    one(overlay.objects, "Service", "weald")["spec"]["ports"][0]["targetPort"] = "web"


def a_label_is_changed_on_one_side(overlay: Overlay) -> None:
    group(overlay, "draft")["template"]["metadata"]["labels"]["weald-part"] = "drafts"


def a_network_policy_forgets_redis(overlay: Overlay) -> None:
    one(overlay.objects, "NetworkPolicy", "redis")["spec"]["ingress"] = []


def a_flag_of_ray_is_misspelt(overlay: Overlay) -> None:
    group(overlay, "verify")["rayStartParams"]["object-store-bytes"] = "1"


def a_secret_is_asked_for_a_key_that_nobody_makes(overlay: Overlay) -> None:
    ray(overlay)["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] = "pass"


def what_serve_is_told_is_edited_by_hand(overlay: Overlay) -> None:
    spec = one(overlay.objects, "RayService", "weald")["spec"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace("max_num_seqs: 128", "max_num_seqs: 256")


def a_verify_pod_has_two_gpus_of_four(overlay: Overlay) -> None:
    for each in ("requests", "limits"):
        container(overlay, "verify")["resources"][each]["nvidia.com/gpu"] = 2


def pages_are_larger_than_the_card(overlay: Overlay) -> None:
    overlay.values["verify"]["kv_cache_memory"] = "60GiB"


def a_pod_is_killed_before_its_sessions_have_left(overlay: Overlay) -> None:
    group(overlay, "draft")["template"]["spec"]["terminationGracePeriodSeconds"] = 30


def a_container_may_write_to_its_root(overlay: Overlay) -> None:
    del container(overlay, "verify")["securityContext"]["readOnlyRootFilesystem"]


def an_image_floats(overlay: Overlay) -> None:
    container(overlay, "draft")["image"] = "weald-cuda:latest"


def an_alert_asks_for_a_metric_that_nobody_tells(overlay: Overlay) -> None:
    rule = one(overlay.objects, "PrometheusRule", "weald")["spec"]["groups"][0]["rules"][0]
    rule["expr"] = rule["expr"].replace("weald_", "weald_the_")


def a_field_of_kubernetes_is_misspelt(overlay: Overlay) -> None:
    one(overlay.objects, "StatefulSet", "redis")["spec"]["replica"] = 1


def the_preStop_hook_has_an_option_that_weald_has_not(overlay: Overlay) -> None:  # noqa: N802
    container(overlay, "draft")["lifecycle"]["preStop"]["exec"]["command"] += ["--force"]


def the_draft_card_is_too_slow(overlay: Overlay) -> None:
    group(overlay, "draft")["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"] = "NVIDIA-L4"


def a_store_is_named_that_is_not_mounted(overlay: Overlay) -> None:
    overlay.values["store"] = "file:///run/secrets/redis/url"


MUTATIONS = {
    a_service_names_a_port_that_nobody_has: "names_and_ports",
    a_label_is_changed_on_one_side: "names_and_ports",
    a_network_policy_forgets_redis: "traffic",
    a_flag_of_ray_is_misspelt: "flags_and_variables",
    a_secret_is_asked_for_a_key_that_nobody_makes: "references",
    what_serve_is_told_is_edited_by_hand: "configuration",
    a_verify_pod_has_two_gpus_of_four: "room",
    pages_are_larger_than_the_card: "plan",
    a_pod_is_killed_before_its_sessions_have_left: "grace",
    a_container_may_write_to_its_root: "policies",
    an_image_floats: "policies",
    an_alert_asks_for_a_metric_that_nobody_tells: "metrics",
    a_field_of_kubernetes_is_misspelt: "schemas",
    the_preStop_hook_has_an_option_that_weald_has_not: "flags_and_variables",
    the_draft_card_is_too_slow: "plan",
    a_store_is_named_that_is_not_mounted: "configuration",
}
"""Each by the check that finds it."""


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_in_a_manifest_is_found(
    mutate: Callable[[Overlay], None], rendered: Callable[[str], Overlay]
) -> None:
    mistaken = deepcopy(rendered("llama-70b"))
    mutate(mistaken)
    assert any(told.startswith(MUTATIONS[mutate]) for told in wrong(mistaken, None))


def test_a_field_that_kuberay_does_not_know_is_found(rendered: Callable[[str], Overlay]) -> None:
    if ("ray.io/v1", "RayService") not in definitions(CRDS):
        pytest.skip("KubeRay's definitions are not here: make k8s CRDS=DIR, with the CRDs of its release")
    mistaken = deepcopy(rendered("llama-70b"))
    group(mistaken, "verify")["numberOfHosts"] = group(mistaken, "verify").pop("numOfHosts")
    assert any("numberOfHosts" in told for told in misshapen(mistaken.objects, CRDS))
