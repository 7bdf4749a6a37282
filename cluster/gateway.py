"""The deployment of gateways, the application's ingress."""

from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.configuration import ClusterConfig
from cluster.serving import ready
from services.cli.gateway import keys_of
from services.engine.names import find_text
from services.gateway.app import Gateway, Settings, create_app
from services.gateway.limits import Limits


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
            tracing=config.telemetry.tracing,
        )
        self._stack = AsyncExitStack()
        self._gateway = await self._stack.enter_async_context(Gateway.opened(settings))
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
