"""From a description to what a RayService is told: Serve's configuration, an application of each kind."""

from collections.abc import Mapping
from typing import Any, get_args

import yaml

from cluster.configuration import EMBEDDED, Kind, Replicas, parse
from services.types.errors import invalid

APPLICATIONS: dict[Kind, str] = {"verify": "weald-verify", "draft": "weald-draft", "gateway": "weald"}
"""Their names. Serve replaces all of an application whose arguments change, hence one for each kind."""
_OWN = {"verify": ("verify",), "draft": ("draft", "speculative_model"), "gateway": ("gateway",)}
"""Keys of the description that concern one kind alone."""
_CALLED = {"host", "port"}
"""Keys of the gateway that are Serve's."""
REPORT_S = 1.0
"""Between two reports of a replica's load."""
LOOK_BACK_S = 2.0
"""Over which it is averaged; what decides is how long it lasts."""


def manifest(values: Mapping[str, Any]) -> str:
    """Serve's configuration in YAML, for the field `serveConfigV2` of a RayService.

    Numbers of replicas stand apart from the arguments: changed, they replace nobody.

    Args:
        values: the keys of `weald.yaml`.

    Raises:
        WealdError: `INVALID_ARGUMENT` when they are not right, or name no store that stays.
    """
    config = parse(values)
    if config.store == EMBEDDED:
        raise invalid("store: a RayService has no embedded Redis; name one, like redis://:PASSWORD@HOST:PORT")
    numbers: dict[Kind, dict[str, Any]] = {
        # Of fixed numbers, too: Serve takes a policy that comes or goes for other code.
        "verify": {"autoscaling_config": autoscaling(config.verify.replicas)},
        "draft": {"autoscaling_config": autoscaling(config.draft.replicas)},
        "gateway": {"num_replicas": config.gateway.replicas},
    }
    described = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.gateway.host, "port": config.gateway.port},
        "applications": [
            {
                "name": APPLICATIONS[kind],
                "route_prefix": "/" if kind == "gateway" else None,
                "import_path": f"cluster.app:{kind}",
                "args": _concerning(kind, values),
                "deployments": [{"name": kind.capitalize(), **numbers[kind]}],
            }
            for kind in get_args(Kind)
        ],
    }
    text: str = yaml.safe_dump(described, sort_keys=False, width=110)
    return text


def autoscaling(replicas: Replicas) -> dict[str, Any]:
    """Serve's bounds and policy for replicas that come and go with their load."""
    return {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "metrics_interval_s": REPORT_S,
        "look_back_period_s": LOOK_BACK_S,
        # The policy has delays of its own; Serve would add these to them.
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "policy": {
            "policy_function": "cluster.scaling.LoadPolicy",
            "policy_kwargs": {
                "target_load": replicas.target_load,
                "upscale_delay_s": replicas.upscale_delay_s,
                "downscale_delay_s": replicas.downscale_delay_s,
            },
        },
    }


def _concerning(kind: Kind, values: Mapping[str, Any]) -> dict[str, Any]:
    others = {key for other, keys in _OWN.items() if other != kind for key in keys}
    found = {key: value for key, value in values.items() if key not in others}
    without = {"replicas"} | (_CALLED if kind == "gateway" else set())
    own = {key: value for key, value in found.get(kind, {}).items() if key not in without}
    return {**found, kind: own}
