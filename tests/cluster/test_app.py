"""What of the application a change of its description replaces; no Ray runs here."""

from typing import Any

import pytest
from ray.serve import Application

from cluster.app import build
from services.types.errors import WealdError

MODEL = {"model": "a", "speculative_model": "h", "store": "redis://127.0.0.1:1"}


def versions(**keys: Any) -> dict[str, str | None]:
    """The version of each deployment; one that changes is replaced."""
    return {name: deployment.version for name, deployment in deployments(build(MODEL | keys)).items()}


def deployments(application: Application) -> dict[str, Any]:
    """The deployments of an application by name."""
    found = {}

    def add(one: Any) -> None:
        found[one._bound_deployment.name] = one._bound_deployment
        for other in one._bound_deployment.init_args:
            if isinstance(other, Application):
                add(other)

    add(application)
    return found


def changed(**keys: Any) -> set[str]:
    """The deployments that are replaced when these keys change."""
    before, after = versions(), versions(**keys)
    return {name for name in before if before[name] != after[name]}


def test_an_application_has_a_gateway_in_front_of_draft_and_verify() -> None:
    assert deployments(build(MODEL)).keys() == {"Gateway", "Draft", "Verify"}


def test_a_change_replaces_only_what_it_concerns() -> None:
    assert changed() == set()
    assert changed(speculative_model="other") == {"Draft"}
    assert changed(draft={"speculative_num_steps": 3}) == {"Draft"}
    assert changed(verify={"max_num_seqs": 8}) == {"Verify"}
    assert changed(gateway={"served_model_name": "b"}) == {"Gateway"}
    assert changed(model="b") == {"Gateway", "Draft", "Verify"}


def test_another_number_of_replicas_replaces_none() -> None:
    many = {"replicas": {"min": 2, "max": 5}}
    assert changed(verify=many, draft=many, gateway={"replicas": 2}) == set()


def test_fixed_numbers_are_fixed_and_bounds_scale_by_load() -> None:
    found = deployments(
        build(MODEL | {"verify": {"replicas": 3}, "draft": {"replicas": {"min": 1, "max": 4}}})
    )
    assert found["Verify"].num_replicas == 3
    assert found["Verify"]._deployment_config.autoscaling_config is None
    scaling = found["Draft"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.policy.policy_function == "cluster.scaling.LoadPolicy"


def test_an_embedded_store_is_refused_where_nobody_would_stop_it() -> None:
    with pytest.raises(WealdError, match="embedded Redis ends with the command"):
        build(MODEL | {"store": "embedded"})


def test_a_verify_replica_is_a_group_of_one_bundle_for_each_rank() -> None:
    each = {"num_cpus": 2, "num_gpus": 1, "accelerator_type": "H200"}
    found = deployments(build(MODEL | {"verify": {"tensor_parallel_size": 4, "resources": each}}))
    group = found["Verify"]._replica_config
    assert group.placement_group_bundles == [{"CPU": 2.0, "GPU": 1.0}] * 4
    assert group.placement_group_bundle_label_selector == [{"ray.io/accelerator-type": "H200"}] * 4
