"""What a RayService is told of a description: an application of each kind, each of which changes alone."""

from typing import Any

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from cluster import app
from cluster.app import build
from cluster.manifest import manifest
from services.types.errors import WealdError

pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s`:DeprecationWarning")
DESCRIBED: dict[str, Any] = {
    "model": "a",
    "speculative_model": "h",
    "store": "redis://127.0.0.1:1",
    "verify": {"kv_cache_memory": "2GiB", "replicas": 2},
    "draft": {"speculative_num_steps": 4, "replicas": {"min": 1, "max": 4}},
    "gateway": {"host": "0.0.0.0", "port": 8123, "served_model_name": "b"},
}


def applications(**keys: Any) -> dict[str, Any]:
    """By name; keys of a section are added to those it has."""
    values = {
        key: {**DESCRIBED.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in keys.items()
    }
    told = yaml.safe_load(manifest(DESCRIBED | values))
    return {each["name"]: each for each in told["applications"]}


def replaced(**keys: Any) -> set[str]:
    """Applications whose replicas Serve replaces when these keys change: those of another version to it."""
    before, after = versions(applications()), versions(applications(**keys))
    return {name for name in before if before[name] != after[name]}


def versions(told: dict[str, Any]) -> dict[str, str]:
    """As Serve reckons them."""
    return {
        name: get_app_code_version(ServeApplicationSchema.model_validate(one)) for name, one in told.items()
    }


def test_serve_takes_it_and_each_application_is_built_as_in_one() -> None:
    told = yaml.safe_load(manifest(DESCRIBED))
    ServeDeploySchema.model_validate(told)
    assert told["http_options"] == {"host": "0.0.0.0", "port": 8123}
    assert [each["route_prefix"] for each in told["applications"]] == [None, None, "/"]
    together = build(DESCRIBED)
    draft, verify = together._bound_deployment.init_args[1:]
    of_one = {each._bound_deployment.name: each._bound_deployment for each in (together, draft, verify)}
    for application in told["applications"]:
        builder = application["import_path"].removeprefix("cluster.app:")
        alone = getattr(app, builder)(application["args"])._bound_deployment
        (number,) = application["deployments"]
        assert alone.name == number["name"]
        beside = of_one[alone.name]
        if builder != "gateway":  # where it listens is Serve's matter here
            assert alone.init_args[0] == beside.init_args[0]
        assert alone.ray_actor_options == beside.ray_actor_options
        if alone.name == "Gateway":
            assert number["num_replicas"] == beside.num_replicas
            continue
        bounds = number["autoscaling_config"]["min_replicas"], number["autoscaling_config"]["max_replicas"]
        scaling = beside._deployment_config.autoscaling_config
        if scaling is None:
            assert bounds == (beside.num_replicas, beside.num_replicas)
        else:
            assert bounds == (scaling.min_replicas, scaling.max_replicas)
            policy = scaling.policy.model_dump(include={"policy_function", "policy_kwargs"})
            assert number["autoscaling_config"]["policy"] == policy


def test_a_change_replaces_only_what_it_concerns() -> None:
    assert replaced(speculative_model="other") == {"weald-draft"}
    assert replaced(draft={"speculative_num_steps": 3}) == {"weald-draft"}
    assert replaced(verify={"max_num_seqs": 8}) == {"weald-verify"}
    assert replaced(gateway={"served_model_name": "c"}) == {"weald"}
    assert replaced(drain=3) == {"weald-verify", "weald-draft", "weald"}


def test_another_number_of_replicas_and_another_port_replace_none() -> None:
    many = {"replicas": {"min": 2, "max": 5}}
    assert replaced(verify=many, draft=many, gateway={"replicas": 2, "port": 80}) == set()
    (number,) = applications(verify=many)["weald-verify"]["deployments"]
    assert number["autoscaling_config"]["max_replicas"] == 5


def test_what_is_wrong_is_told_before_anything_is_written() -> None:
    with pytest.raises(WealdError, match=r"draft\.levels: Extra inputs are not permitted"):
        manifest(DESCRIBED | {"draft": {"levels": 3}})
    with pytest.raises(WealdError, match="a RayService has no embedded Redis"):
        manifest({"model": "a"})
