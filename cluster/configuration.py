"""One description of a cluster: the same file serves a laptop and many nodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from services.cli.options import memory_size
from services.telemetry.logs import LogFormat, LogLevel, log_to_stderr
from services.types.configuration import DraftConfig, Tracing, TreeShape, VerifyLimits, sized
from services.types.errors import WealdError, invalid
from services.wire.transport import Tls

Kind = Literal["verify", "draft", "gateway"]
"""Of the replicas, as the file's keys."""
EMBEDDED = "embedded"
"""A Redis of this machine alone, which `weald serve` starts and stops."""


def _bytes(size: Any) -> Any:
    try:
        return memory_size(size) if isinstance(size, str) else size
    except WealdError as error:
        raise ValueError(error.message) from error


Size = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
"""Bytes; written like 512MiB."""
Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Part):
    """What one process asks of a node."""

    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """A fraction shares a GPU with other processes."""
    accelerator_type: str | None = None
    """As Ray labels nodes: A100, L4, H200, …"""
    labels: Mapping[str, str] = {}
    """Further labels that the node must have."""
    resources: Mapping[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resources."""

    @model_validator(mode="after")
    def _countable(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ValueError(f"num_gpus ({self.num_gpus:g}) must be whole, or below 1 for a share of one")
        if self.resources.keys() & {"CPU", "GPU"}:
            raise ValueError("CPU and GPU are no custom resources; give num_cpus and num_gpus")
        return self

    @property
    def selector(self) -> dict[str, str]:
        """All labels that a node must have."""
        typed = {"ray.io/accelerator-type": self.accelerator_type} if self.accelerator_type else {}
        return {**self.labels, **typed}

    @property
    def asked(self) -> dict[str, float]:
        """Amounts by resource, as Ray names them."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class Replicas(_Part):
    """How many replicas of a kind there are; between `min` and `max` their own load decides."""

    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)] = 1
    target_load: Share = 0.7
    """Load of a replica that is aimed at, 1.0 being all it can take."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 5.0
    """So long more replicas must be wanted before they come."""
    downscale_delay_s: Annotated[float, Field(ge=0)] = 60.0
    """So long fewer must do before some go."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return {"min": value, "max": value} if isinstance(value, int) else value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) must be at least min ({self.min})")
        return self


class Verify(_Part):
    """Verify replicas; `resources` are those of each tensor-parallel rank."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: int = VerifyLimits().max_num_seqs
    max_num_batched_tokens: int = VerifyLimits().max_num_batched_tokens
    max_waiting: int = VerifyLimits().max_waiting
    kv_cache_memory: Size = 2**30
    """Of keys, values and features, on each rank."""
    resources: Resources = Resources()
    replicas: Replicas = Replicas()

    @property
    def limits(self) -> VerifyLimits:
        """What a replica takes on. Raises `WealdError(INVALID_ARGUMENT)` when a limit is out of range."""
        return VerifyLimits(self.max_num_batched_tokens, self.max_num_seqs, self.max_waiting)


class Draft(_Part):
    """Draft replicas."""

    tree: TreeShape = DraftConfig().shape
    speculative_budget: int | Literal["auto"] = "auto"
    speculative_eagle_topk: int = DraftConfig().beam
    speculative_num_steps: int | Literal["auto"] = "auto"
    speculative_coupling: bool = True
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    kv_cache_memory: Size = 2**28
    """Of the head's keys and values."""
    resources: Resources = Resources(num_cpus=0.5)
    replicas: Replicas = Replicas()

    @property
    def config(self) -> DraftConfig:
        """Sizes of the trees. Raises `WealdError(INVALID_ARGUMENT)` when one is out of range."""
        levels, budget = self.speculative_num_steps, self.speculative_budget
        return sized(self.tree, levels, self.speculative_eagle_topk, budget, self.speculative_coupling)


class Gateway(_Part):
    """Gateways, and where they are reached."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    served_model_name: str | None = None
    api_key_file: Path | None = None
    """On every node that runs a gateway."""
    allow_origins: tuple[str, ...] = ()
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 256
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    max_request_size: Size = 4 * 2**20
    request_timeout: Annotated[float, Field(gt=0)] = 600.0
    resources: Resources = Resources(num_cpus=0.25)
    replicas: Annotated[int, Field(ge=1)] = 1


class Telemetry(_Part):
    """Where spans go, nowhere by default, and what the logs look like."""

    trace_file: Path | None = None
    """Absolute; on every node, appended to by all processes there."""
    otlp_traces_endpoint: str = ""
    """Of an OpenTelemetry collector."""
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the requests that come without a trace, those that are sampled."""
    trace_content: bool = False
    """Whether spans hold token ids, of which the text can be read."""
    log_format: LogFormat = LogFormat.PRETTY
    log_level: LogLevel = LogLevel.WARNING

    def log(self) -> None:
        """Let this process log so."""
        log_to_stderr(self.log_format, self.log_level)

    @property
    def tracing(self) -> Tracing:
        """For a service."""
        return Tracing(self.trace_file, self.otlp_traces_endpoint, self.trace_ratio, self.trace_content)


class MutualTls(_Part):
    """Files in PEM that every node has, for the connections between gateways, draft and verify replicas."""

    certificate: Path
    key: Path
    authority: Path
    name: str = "weald"
    """What all certificates are issued to: addresses of replicas are not known before they run."""


class ClusterConfig(_Part):
    """A cluster: what is served, by how many replicas, on what."""

    model: str
    speculative_model: str | None = None
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    store: str = EMBEDDED
    """`embedded`, or a URL like redis://… or the file:///… that holds one."""
    drain: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that sessions may go on at a replica that is told to end and finds no other to take them."""
    hang_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after which a target step or the drafting of trees counts as hung: its replica is replaced."""
    verify: Verify = Verify()
    draft: Draft = Draft()
    gateway: Gateway = Gateway()
    telemetry: Telemetry = Telemetry()
    tls: MutualTls | None = None
    """None: replicas talk in the clear."""

    @property
    def links(self) -> Tls | None:
        """Of the connections between replicas."""
        tls = self.tls
        return Tls(tls.certificate, tls.key, tls.authority, tls.name) if tls else None

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        try:
            self.verify.limits, self.draft.config  # noqa: B018
        except WealdError as error:
            raise ValueError(error.message) from error
        return self


def read(file: Path | None, given: Mapping[str, Any]) -> ClusterConfig:
    """The description in a YAML file, with what is given besides in place of its values.

    Args:
        file: None: all is as given, or by default.
        given: nested as the file; None stands for nothing given.

    Raises:
        WealdError: `INVALID_ARGUMENT` that names every unknown key and every value out of range.
    """
    return parse(_merged(loaded(file) if file else {}, given))


def parse(values: Mapping[str, Any]) -> ClusterConfig:
    """The description that such values make. Raises as `read` does."""
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        told = "; ".join(_told(one["loc"], one["msg"]) for one in error.errors())
        raise invalid(f"the configuration is not right: {told}") from error


def _told(place: tuple[str | int, ...], what: str) -> str:
    return f"{'.'.join(map(str, place)) or 'it'}: {what.removeprefix('Value error, ')}"


def loaded(file: Path) -> Mapping[str, Any]:
    """What a YAML file holds. Raises `WealdError(INVALID_ARGUMENT)` when that is no keys and values."""
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise invalid(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise invalid(f"{file} must hold keys and values, the first of them `model`")
    return values


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged
