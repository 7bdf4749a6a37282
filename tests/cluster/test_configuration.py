"""One description: what it leaves out has a default, what it gets wrong is named by its place in the file."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.configuration import ClusterConfig, Replicas, parse, read
from services.types.configuration import DraftConfig, TreeShape, VerifyLimits, sized
from services.types.errors import ErrorCode, WealdError

MODEL: dict[str, Any] = {"model": "m"}


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(WealdError) as raised:
        parse(values)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    return raised.value.message


def test_a_model_is_enough_and_the_rest_is_as_the_services_have_it() -> None:
    config = parse(MODEL)
    assert config.verify.limits == VerifyLimits()
    assert config.draft.config == sized(TreeShape.DYNAMIC, "auto", DraftConfig().beam, "auto")
    assert config.store == "embedded"
    assert config.verify.replicas == config.draft.replicas == Replicas(min=1, max=1)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"modle": "m"}, "modle"),
        ({"verify": {"tensor_parallel": 2}}, "verify.tensor_parallel"),
        ({"verify": {"resources": {"num_gpu": 1}}}, "verify.resources.num_gpu"),
        ({"draft": {"replicas": {"min": 1, "maximum": 2}}}, "draft.replicas.maximum"),
        ({"gateway": {"resources": {"lables": {}}}}, "gateway.resources.lables"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_at_any_depth(values: dict[str, Any], place: str) -> None:
    assert f"{place}: Extra inputs are not permitted" in refused(MODEL | values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"verify": {"tensor_parallel_size": 0}},
            "verify.tensor_parallel_size: .* greater than or equal to 1",
        ),
        ({"verify": {"max_model_len": 1}}, "verify.max_model_len: .* greater than or equal to 2"),
        ({"verify": {"kv_cache_memory": 0}}, "verify.kv_cache_memory: .* greater than 0"),
        ({"verify": {"max_num_seqs": 0}}, "max_num_seqs must be at least 1, got 0"),
        ({"verify": {"max_num_seqs": 9, "max_num_batched_tokens": 8}}, "max_num_batched_tokens .8. must be"),
        ({"draft": {"speculative_budget": 65}}, r"the tree budget must be in \[1, 64\], got 65"),
        ({"draft": {"tree": "bush"}}, "draft.tree: .*'dynamic', 'static' or 'chain'"),
        (
            {"draft": {"resources": {"num_cpus": -1}}},
            "draft.resources.num_cpus: .* greater than or equal to 0",
        ),
        ({"draft": {"resources": {"num_gpus": 1.5}}}, r"draft.resources: num_gpus \(1.5\) must be whole"),
        ({"draft": {"resources": {"resources": {"GPU": 1}}}}, "draft.resources: CPU and GPU are no custom"),
        ({"draft": {"resources": {"resources": {"disk": 0}}}}, "draft.resources.resources.disk: .* than 0"),
        ({"draft": {"replicas": 0}}, "draft.replicas.min: .* greater than or equal to 1"),
        (
            {"draft": {"replicas": {"min": 3, "max": 2}}},
            r"draft.replicas: max \(2\) must be at least min \(3\)",
        ),
        (
            {"draft": {"replicas": {"target_load": 1.5}}},
            "draft.replicas.target_load: .* less than or equal to 1",
        ),
        ({"gateway": {"port": 70000}}, "gateway.port: .* less than or equal to 65535"),
        ({"gateway": {"replicas": 0}}, "gateway.replicas: .* greater than or equal to 1"),
        ({"dtype": "int8"}, "dtype: .*'bfloat16'"),
        ({"drain": -1}, "drain: .* greater than or equal to 0"),
    ],
)
def test_a_value_out_of_range_is_told_with_its_place(values: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(MODEL | values))


def test_all_that_is_wrong_is_told_at_once() -> None:
    message = refused({"modle": "m", "verify": {"max_model_len": 0}, "gateway": {"port": -1}})
    assert all(
        f"{place}: " in message for place in ("model", "modle", "verify.max_model_len", "gateway.port")
    )


@pytest.mark.parametrize(
    ("written", "size"),
    [("512MiB", 512 * 2**20), ("4e9", 4 * 10**9), ("1.5 GiB", 3 * 2**29), (1000, 1000), ("20GB", 2 * 10**10)],
)
def test_sizes_are_numbers_with_or_without_a_unit(written: str | int, size: int) -> None:
    assert parse(MODEL | {"verify": {"kv_cache_memory": written}}).verify.kv_cache_memory == size


def test_a_size_that_is_none_is_told_how_to_write_one() -> None:
    message = refused(MODEL | {"verify": {"kv_cache_memory": "much"}})
    assert "verify.kv_cache_memory: 'much' is no size of memory; write a number and a unit" in message


@given(count=st.integers(1, 100))
def test_replicas_can_be_one_number_or_bounds(count: int) -> None:
    assert parse(MODEL | {"draft": {"replicas": count}}).draft.replicas == Replicas(min=count, max=count)
    bounds = {"min": count, "max": count + 3, "downscale_delay_s": 5}
    found = parse(MODEL | {"verify": {"replicas": bounds}}).verify.replicas
    assert (found.min, found.max, found.downscale_delay_s) == (count, count + 3, 5.0)


def test_resources_are_what_ray_is_asked_for() -> None:
    resources = {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "accelerator_type": "L4",
        "labels": {"zone": "a"},
        "resources": {"disk": 3},
    }
    found = parse(MODEL | {"draft": {"resources": resources}}).draft.resources
    assert found.asked == {"CPU": 2.0, "GPU": 0.5, "disk": 3.0}
    assert found.selector == {"zone": "a", "ray.io/accelerator-type": "L4"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A description in a file."""
    path = tmp_path / "weald.yaml"
    path.write_text(
        "model: m\nverify:\n  max_num_seqs: 8\n  replicas: {min: 1, max: 4}\ngateway: {port: 9}\n"
    )
    return path


def test_what_is_given_stands_in_place_of_what_the_file_says_and_none_is_nothing(file: Path) -> None:
    given = {
        "model": None,
        "verify": {"max_num_seqs": 16, "max_model_len": None, "replicas": {"max": 2}},
        "draft": {"tree": "chain"},
        "gateway": {"port": 0},
    }
    config = read(file, given)
    assert (config.model, config.gateway.port, config.draft.tree) == ("m", 0, TreeShape.CHAIN)
    assert (config.verify.max_num_seqs, config.verify.max_model_len) == (16, None)
    assert (config.verify.replicas.min, config.verify.replicas.max) == (1, 2)


def test_one_number_of_replicas_replaces_bounds(file: Path) -> None:
    assert read(file, {"verify": {"replicas": 3}}).verify.replicas == Replicas(min=3, max=3)


def test_without_a_file_all_is_as_given() -> None:
    assert read(None, {"model": "m", "verify": {"max_num_seqs": None}}) == ClusterConfig(model="m")


@pytest.mark.parametrize("content", ["", "- a\n", "model", "{", "\x00"])
def test_a_file_that_is_no_description_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "weald.yaml").write_text(content)
    with pytest.raises(WealdError, match=r"weald\.yaml (cannot be read|must hold keys and values)"):
        read(tmp_path / "weald.yaml", {})
    with pytest.raises(WealdError, match=r"other\.yaml cannot be read"):
        read(tmp_path / "other.yaml", {})


def test_a_description_survives_as_json(file: Path) -> None:
    config = read(file, {})
    assert parse(config.model_dump(mode="json")) == config
