"""From a description to the Serve application: `weald serve`, `serve run cluster.app:build`, RayService."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

import weald
from cluster.configuration import EMBEDDED, ClusterConfig, Draft, Gateway, Replicas, Resources, Verify, parse
from cluster.draft import DraftReplica
from cluster.gateway import GatewayReplica
from cluster.planning import Node, can_surge, verify_placement
from cluster.scaling import LoadPolicy
from cluster.verify import VerifyReplica
from services.types.errors import invalid

NAME = "weald"
"""Of the application."""
HEALTH_S = 2.0
"""Between two checks of a replica."""
HEALTH_WITHIN_S = 10.0
REPORT_S = 1.0
"""Between two reports of a replica's load."""
LOOK_BACK_S = 2.0
"""Over which it is averaged; what decides is how long it lasts."""
STOP_S = 10.0
"""For a replica to end, once its sessions have left."""


def build(args: Mapping[str, Any]) -> Application:
    """The application of three deployments that a description asks for, as Serve's builders are called.

    Args:
        args: the keys of `weald.yaml`.

    Raises:
        WealdError: `INVALID_ARGUMENT` when they are not right.
    """
    config = parse(args)
    return application(config, config, ())


def application(config: ClusterConfig, before: ClusterConfig, nodes: Sequence[Node]) -> Application:
    """The application of a description, placed as the nodes allow.

    A deployment is given only what concerns it: what changes elsewhere does not replace its replicas.

    Args:
        config: the description.
        before: what runs; itself, when nothing does.
        nodes: of the cluster; none: they are not known yet.

    Raises:
        WealdError: `INVALID_ARGUMENT` without a store that the replicas can reach.
    """
    if config.store == EMBEDDED:
        raise invalid(
            "store: an embedded Redis ends with the command that starts it, so it is for `weald serve` "
            "without --address; name one that stays, like redis://HOST:PORT"
        )
    common = config.model_copy(
        update={"speculative_model": None, "draft": Draft(), "gateway": Gateway(), "verify": Verify()}
    )
    one = Replicas()
    for_verify = common.model_copy(update={"verify": config.verify.model_copy(update={"replicas": one})})
    for_draft = common.model_copy(
        update={
            "speculative_model": config.speculative_model,
            "draft": config.draft.model_copy(update={"replicas": one}),
        }
    )
    for_gateway = common.model_copy(update={"gateway": config.gateway.model_copy(update={"replicas": 1})})
    kinds: tuple[Literal["verify", "draft", "gateway"], ...] = ("verify", "draft", "gateway")
    surge = {key: 100 if nodes and can_surge(key, before, config, nodes) else 0 for key in kinds}
    placement = verify_placement(config, nodes)
    each = config.verify.resources
    verify = _deployment(VerifyReplica, "Verify", for_verify).options(
        placement_group_bundles=[dict(bundle) for bundle in placement.bundles],
        placement_group_strategy=placement.strategy,
        placement_group_bundle_label_selector=[dict(one) for one in placement.label_selectors],
        ray_actor_options=_actor(each, {}),
        **_number(config.verify.replicas),
        max_surge_percent=surge["verify"],
    )
    draft = _deployment(DraftReplica, "Draft", for_draft).options(
        ray_actor_options=_actor(config.draft.resources, config.draft.resources.selector),
        **_number(config.draft.replicas),
        max_surge_percent=surge["draft"],
    )
    gateway = _deployment(GatewayReplica, "Gateway", for_gateway).options(
        ray_actor_options=_actor(config.gateway.resources, config.gateway.resources.selector),
        num_replicas=config.gateway.replicas,
        max_ongoing_requests=config.gateway.max_concurrent_requests + config.gateway.max_queued_requests,
        max_surge_percent=surge["gateway"],
        user_config=config.model_dump(mode="json"),
    )
    return gateway.bind(for_gateway, draft.bind(for_draft), verify.bind(for_verify))


def _deployment(kind: type, name: str, config: ClusterConfig) -> Deployment:
    # Serve takes every run as new code; with a version of our own only what really changed is replaced.
    version = hashlib.sha256(f"{weald.__version__} {config.model_dump_json()}".encode()).hexdigest()
    deployed = serve.deployment(
        kind,
        name=name,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_WITHIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain + STOP_S,
    )
    assert isinstance(deployed, Deployment)
    return deployed.options(version=version, _internal=True)


def _actor(each: Resources, selector: Mapping[str, str]) -> dict[str, Any]:
    return {
        "num_cpus": each.num_cpus,
        "num_gpus": each.num_gpus,
        "resources": dict(each.resources),
        **({"label_selector": dict(selector)} if selector else {}),
    }


def _number(replicas: Replicas) -> dict[str, Any]:
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LoadPolicy,
        policy_kwargs={
            "target_load": replicas.target_load,
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
        },
    )
    with warnings.catch_warnings():
        # It would have the interval in the environment of every node.
        warnings.simplefilter("ignore", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            # The policy has delays of its own; Serve would add these to them.
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=policy,
        )
    return {"autoscaling_config": scaling}
