"""Start, change and stop the application on a local Ray or in a cluster that runs."""

import asyncio
import logging
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview

from cluster.app import NAME, application
from cluster.checking import problems
from cluster.configuration import EMBEDDED, ClusterConfig, parse
from cluster.manifest import APPLICATIONS
from cluster.planning import Node, steps
from services.engine.ranks import free_port
from services.sessions.embedded import embedded
from services.sessions.opening import opened
from services.sessions.registry import everyone
from services.types.errors import ErrorCode, WealdError, invalid

LOCAL = "local"
"""A Ray of this machine alone, which ends with the command."""
CALM = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_task_events_report_interval_ms": "0",
}
"""What a Ray of one machine does without, or less often, so that it takes less of the processor."""
ANSWER_S = 5.0
READY_S = 60.0
"""For the replicas, once they are up, to find each other."""
POLL_S = 0.2


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Ray at host:port, `auto` for the one that runs here, or `local` for one that ends with the block.

    Raises:
        WealdError: `UNAVAILABLE` when there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        # As a plain process would; Ray gives a process one thread for each of its CPUs.
        os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        options["include_dashboard"] = False
        for name, value in CALM.items():
            os.environ.setdefault(name, value)
    try:
        if address not in (LOCAL, "auto"):
            _reach(address)
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, namespace="weald")
    except OSError as error:
        raise WealdError(
            ErrorCode.UNAVAILABLE, f"there is no Ray at {address}: {error}; start one, or leave --address out"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises `OSError` when nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except ValueError:
        raise ConnectionError("an address is host:port") from None


def nodes() -> list[Node]:
    """The nodes of the cluster that live."""
    every = ray.nodes()  # type: ignore[no-untyped-call]
    living = [node for node in every if node["Alive"]]
    return [Node(node["NodeID"], node["Resources"], node.get("Labels", {})) for node in living]


@contextmanager
def local(config: ClusterConfig) -> Iterator[str]:
    """The application on a Ray of its own, ready to answer; its base URL. All of it ends with the block.

    Raises:
        WealdError: `INVALID_ARGUMENT` that tells all that is wrong, before anything starts; `UNAVAILABLE`
            when it does not come up.
    """
    with ExitStack() as stack:
        if config.store == EMBEDDED:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weald-store-"))
            config = stored(config, stack.enter_context(embedded(Path(directory))).file)
        stack.enter_context(connected(LOCAL))
        stack.callback(serve.delete, NAME)
        yield deploy(config)


def stored(config: ClusterConfig, file: Path) -> ClusterConfig:
    """With the store that a file names."""
    return config.model_copy(update={"store": file.as_uri()})


def deploy(config: ClusterConfig) -> str:
    """Run the application in the Ray that is connected, or change the one that runs; its URL, when ready.

    What the change does not concern goes on; what it does is replaced, replica by replica.

    Raises:
        WealdError: as `local` does.
    """
    if not config.gateway.port:
        config = config.model_copy(
            update={"gateway": config.gateway.model_copy(update={"port": free_port()})}
        )
    if declared():
        raise invalid(
            "a RayService describes what runs here; change its weald.yaml, then apply what `weald manifest` "
            "makes of it"
        )
    found, running = nodes(), NAME in serve.status().applications
    if wrong := asyncio.run(problems(config, found, running=running)):
        raise invalid("; ".join(wrong))
    before = described() if running else config
    gateway = config.gateway
    # One address is told, so one proxy listens: that of the head.
    serve.start("HeadOnly", HTTPOptions(host=gateway.host, port=gateway.port))
    try:
        for step in steps(before, config):
            serve.run(application(step, before, found), name=NAME, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise WealdError(ErrorCode.UNAVAILABLE, f"the replicas do not come up: {error}") from error
    url = f"http://{gateway.host}:{gateway.port}"
    _wait(url)
    return url


def deployments() -> dict[str, DeploymentStatusOverview]:
    """What Serve says of the deployments of the application that runs, by name."""
    applications = serve.status().applications
    running = [applications[name] for name in APPLICATIONS.values() if name in applications]
    return {name: one for application in running for name, one in application.deployments.items()}


def declared() -> bool:
    """Whether what runs was described by `weald manifest`: an application of each kind."""
    return APPLICATIONS["verify"] in serve.status().applications


def described() -> ClusterConfig:
    """What the application that runs was last given.

    Raises:
        WealdError: `UNAVAILABLE` when none runs.
    """
    return parse(_gateway().description.remote().result(timeout_s=ANSWER_S))


def here() -> str:
    """The id of the node that this process runs on."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def vacate(node: str, within_s: float) -> bool:
    """Let Serve move the replicas of a node elsewhere, as far as there is room; whether all have gone.

    The node takes none again. What has found no room is told to end before the time is over, too.

    Args:
        node: its id.
        within_s: seconds, after which the node ends.

    Raises:
        WealdError: `UNAVAILABLE` when Ray does not let the node go.
    """
    deadline = time.monotonic() + within_s
    options = {
        "--address": ray.get_runtime_context().gcs_address,
        "--node-id": node,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "its pod ends",
        "--deadline-remaining-seconds": str(math.ceil(within_s)),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *chain(*options.items())]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise WealdError(ErrorCode.UNAVAILABLE, f"Ray does not let this node go: {told.stderr.strip()}")
    store = ""
    while time.monotonic() < deadline:
        # Whoever cannot be asked now, a gateway that is full or a store that is away, is asked again.
        with suppress(WealdError, TimeoutError):
            store = store or described().store
            if not asyncio.run(_living(store, node)):
                return True
        time.sleep(POLL_S)
    return False


async def _living(store: str, node: str) -> int:
    async with opened(store) as sessions:
        return sum(one.node == node for one in await everyone(sessions))


def _gateway() -> DeploymentHandle[Any]:
    try:
        return serve.get_app_handle(NAME)
    except RayServeException as error:
        raise WealdError(
            ErrorCode.UNAVAILABLE, f"no {NAME} application runs in this Ray; start it with `weald serve`"
        ) from error


def _wait(url: str) -> None:
    """Until the gateway says that sessions can be served."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with opener.open(f"{url}/ready", timeout=ANSWER_S):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WealdError(
                    ErrorCode.UNAVAILABLE, f"{url}/ready does not answer that sessions can be served: {error}"
                ) from error
        time.sleep(POLL_S)
