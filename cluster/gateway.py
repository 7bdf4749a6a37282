"""The deployment of gateways, the application's ingress."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.configuration import ClusterConfig
from cluster.serving import placed, ready
from services.cli.gateway import keys_of
from services.engine.names import find_text
from services.gateway.app import Gateway, Settings, create_app
from services.gateway.limits import Limits
from services.sessions.opening import opened
from services.sessions.registry import announce
from services.telemetry.metrics import exposed
from services.types.replica import Replica, ReplicaKind


@serve.ingress()
class GatewayReplica:
    """OpenAI's API; it also keeps the description of the cluster, for whoever changes it."""

    async def __init__(self, config: ClusterConfig, *_: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        """Look for draft replicas, in the store. Raises as `Gateway.opened` does."""
        config.telemetry.log()
        gateway = config.gateway
        settings = Settings(
            model=gateway.served_model_name or config.model,
            target=config.model,
            directory=find_text(config.model),
            store=config.store,
            api_keys=tuple(keys_of(gateway.api_key_file)),
            origins=gateway.allow_origins,
            limits=Limits(
                gateway.max_concurrent_requests,
                gateway.max_queued_requests,
                gateway.max_request_size,
                gateway.request_timeout,
            ),
            tls=config.links,
            tracing=config.telemetry.tracing,
        )
        self._stack = AsyncExitStack()
        self._gateway = await self._stack.enter_async_context(Gateway.opened(settings))
        await self._stack.enter_async_context(_listed(config, self._gateway.metrics.registry))
        self._description: dict[str, Any] = {}
        # In an update the gateways before this one stay until it can serve.
        await ready(self._gateway.readiness.now)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._gateway)

    def reconfigure(self, description: dict[str, Any]) -> None:
        """Take the description of the whole cluster; it changes nothing here."""
        self._description = description

    def description(self) -> dict[str, Any]:
        """The description that the cluster was last given, as `cluster.configuration.parse` takes it."""
        return self._description

    async def __del__(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def _listed(config: ClusterConfig, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Expose metrics at a port of their own, listed: behind Serve's proxies nobody chooses whom to ask."""
    place = placed(0)
    with exposed(place, 0, registry) as address:
        replica = Replica(ReplicaKind.GATEWAY, address, b"", config.model, node=place.node, metrics=address)
        async with opened(config.store) as store:
            announcing = asyncio.create_task(announce(store, lambda: replica))
            try:
                yield
            finally:
                announcing.cancel()
                await asyncio.gather(announcing, return_exceptions=True)
