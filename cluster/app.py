"""From a description to the Serve application: `weald serve`, `serve run cluster.app:build`, RayService."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig

import weald
from cluster.configuration import (
    EMBEDDED,
    ClusterConfig,
    Draft,
    Gateway,
    Kind,
    Replicas,
    Resources,
    Verify,
    parse,
)
from cluster.draft import DraftReplica
from cluster.gateway import GatewayReplica
from cluster.manifest import APPLICATIONS, autoscaling
from cluster.planning import Node, can_surge, verify_placement
from cluster.verify import VerifyReplica
from services.types.errors import invalid

NAME = APPLICATIONS["gateway"]
"""Of the application, or of the one that answers."""
HEALTH_S = 2.0
"""Between two checks of a replica."""
HEALTH_WITHIN_S = 10.0
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


def verify(args: Mapping[str, Any]) -> Application:
    """The verify replicas alone, as `cluster.manifest` describes them. Raises as `build` does."""
    return _alone("verify", args)


def draft(args: Mapping[str, Any]) -> Application:
    """The draft replicas alone, likewise. Raises as `build` does."""
    return _alone("draft", args)


def gateway(args: Mapping[str, Any]) -> Application:
    """The gateways alone, likewise. Raises as `build` does."""
    return _alone("gateway", args)


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

    def bound(kind: Kind, *behind: Application) -> Application:
        surge = 100 if nodes and can_surge(kind, before, config, nodes) else 0
        deployment = _options(kind, config, nodes).options(max_surge_percent=surge)
        return deployment.bind(concern(kind, config), *behind)

    _refuse_embedded(config)
    return bound("gateway", bound("draft"), bound("verify"))


def concern(kind: Kind, config: ClusterConfig) -> ClusterConfig:
    """What of a description concerns the replicas of a kind; their number does not."""
    common = {"speculative_model": None, "draft": Draft(), "gateway": Gateway(), "verify": Verify()}
    one = {"replicas": 1 if kind == "gateway" else Replicas()}
    own: dict[str, Any] = {kind: getattr(config, kind).model_copy(update=one)}
    if kind == "draft":
        own["speculative_model"] = config.speculative_model
    return config.model_copy(update=common | own)


def _alone(kind: Kind, args: Mapping[str, Any]) -> Application:
    config = parse(args)
    _refuse_embedded(config)
    return _options(kind, config, ()).options(max_surge_percent=0).bind(concern(kind, config))


def _refuse_embedded(config: ClusterConfig) -> None:
    if config.store == EMBEDDED:
        raise invalid(
            "store: an embedded Redis ends with the command that starts it, so it is for `weald serve` "
            "without --address; name one that stays, like redis://HOST:PORT"
        )


def _options(kind: Kind, config: ClusterConfig, nodes: Sequence[Node]) -> Deployment:
    """The deployment of a kind, its number and its place."""
    if kind == "verify":
        placement = verify_placement(config, nodes)
        return _deployment(VerifyReplica, "Verify", concern(kind, config)).options(
            placement_group_bundles=[dict(bundle) for bundle in placement.bundles],
            placement_group_strategy=placement.strategy,
            placement_group_bundle_label_selector=[dict(one) for one in placement.label_selectors],
            ray_actor_options=_actor(config.verify.resources, {}),
            **_number(config.verify.replicas),
        )
    if kind == "draft":
        return _deployment(DraftReplica, "Draft", concern(kind, config)).options(
            ray_actor_options=_actor(config.draft.resources, config.draft.resources.selector),
            **_number(config.draft.replicas),
        )
    each = config.gateway
    return _deployment(GatewayReplica, "Gateway", concern(kind, config)).options(
        ray_actor_options=_actor(each.resources, each.resources.selector),
        num_replicas=each.replicas,
        max_ongoing_requests=each.max_concurrent_requests + each.max_queued_requests,
        user_config=config.model_dump(mode="json"),
    )


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
    with warnings.catch_warnings():
        # It would have the interval in the environment of every node.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"autoscaling_config": AutoscalingConfig(**autoscaling(replicas))}
