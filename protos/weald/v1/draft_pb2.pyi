from weald.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TreeShape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TREE_SHAPE_UNSPECIFIED: _ClassVar[TreeShape]
    TREE_SHAPE_DYNAMIC: _ClassVar[TreeShape]
    TREE_SHAPE_STATIC: _ClassVar[TreeShape]
    TREE_SHAPE_CHAIN: _ClassVar[TreeShape]

class ReplicaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_KIND_UNSPECIFIED: _ClassVar[ReplicaKind]
    REPLICA_KIND_DRAFT: _ClassVar[ReplicaKind]
    REPLICA_KIND_VERIFY: _ClassVar[ReplicaKind]
TREE_SHAPE_UNSPECIFIED: TreeShape
TREE_SHAPE_DYNAMIC: TreeShape
TREE_SHAPE_STATIC: TreeShape
TREE_SHAPE_CHAIN: TreeShape
REPLICA_KIND_UNSPECIFIED: ReplicaKind
REPLICA_KIND_DRAFT: ReplicaKind
REPLICA_KIND_VERIFY: ReplicaKind

class DraftConfig(_message.Message):
    __slots__ = ("shape", "levels", "beam", "budget", "adaptive_levels", "adaptive_budget", "coupled")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    COUPLED_FIELD_NUMBER: _ClassVar[int]
    shape: TreeShape
    levels: int
    beam: int
    budget: int
    adaptive_levels: bool
    adaptive_budget: bool
    coupled: bool
    def __init__(self, shape: _Optional[_Union[TreeShape, str]] = ..., levels: _Optional[int] = ..., beam: _Optional[int] = ..., budget: _Optional[int] = ..., adaptive_levels: _Optional[bool] = ..., adaptive_budget: _Optional[bool] = ..., coupled: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session", "tokens", "prompt_length", "params", "speculative", "draft", "want_trees", "traceparent", "priority", "coupled")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    WANT_TREES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    COUPLED_FIELD_NUMBER: _ClassVar[int]
    session: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    params: _session_pb2.SamplingParams
    speculative: bool
    draft: DraftConfig
    want_trees: bool
    traceparent: str
    priority: _session_pb2.Priority
    coupled: bool
    def __init__(self, session: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., params: _Optional[_Union[_session_pb2.SamplingParams, _Mapping]] = ..., speculative: _Optional[bool] = ..., draft: _Optional[_Union[DraftConfig, _Mapping]] = ..., want_trees: _Optional[bool] = ..., traceparent: _Optional[str] = ..., priority: _Optional[_Union[_session_pb2.Priority, str]] = ..., coupled: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "round", "finished", "moved", "draining")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    started: Started
    round: Round
    finished: Finished
    moved: Moved
    draining: DraftServiceDraining
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., draining: _Optional[_Union[DraftServiceDraining, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session", "seed", "cached_tokens", "verifier")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    session: str
    seed: int
    cached_tokens: int
    verifier: str
    def __init__(self, session: _Optional[str] = ..., seed: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., verifier: _Optional[str] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("kind", "address", "lost")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    kind: ReplicaKind
    address: str
    lost: bool
    def __init__(self, kind: _Optional[_Union[ReplicaKind, str]] = ..., address: _Optional[str] = ..., lost: _Optional[bool] = ...) -> None: ...

class DraftServiceDraining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Round(_message.Message):
    __slots__ = ("position", "tokens", "drafted", "verified", "draft_ns", "verify_ns", "tree", "accepted", "finish", "logprobs", "nodes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafted: int
    verified: int
    draft_ns: int
    verify_ns: int
    tree: _session_pb2.DraftTree
    accepted: _containers.RepeatedScalarFieldContainer[int]
    finish: _session_pb2.FinishReason
    logprobs: _session_pb2.Logprobs
    nodes: int
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., drafted: _Optional[int] = ..., verified: _Optional[int] = ..., draft_ns: _Optional[int] = ..., verify_ns: _Optional[int] = ..., tree: _Optional[_Union[_session_pb2.DraftTree, _Mapping]] = ..., accepted: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_session_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Union[_session_pb2.Logprobs, _Mapping]] = ..., nodes: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "output_tokens", "cached_tokens")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _session_pb2.FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, finish_reason: _Optional[_Union[_session_pb2.FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DraftServiceStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceStatusResponse(_message.Message):
    __slots__ = ("model", "fingerprint", "dtype", "device", "running", "num_pages", "free_pages", "verifiers", "counters", "cost", "reliability")
    class VerifiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CostEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    RELIABILITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: bytes
    dtype: str
    device: str
    running: int
    num_pages: int
    free_pages: int
    verifiers: _containers.ScalarMap[str, bool]
    counters: _containers.ScalarMap[str, int]
    cost: _containers.ScalarMap[int, float]
    reliability: _containers.RepeatedCompositeFieldContainer[Reliability]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., running: _Optional[int] = ..., num_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., verifiers: _Optional[_Mapping[str, bool]] = ..., counters: _Optional[_Mapping[str, int]] = ..., cost: _Optional[_Mapping[int, float]] = ..., reliability: _Optional[_Iterable[_Union[Reliability, _Mapping]]] = ...) -> None: ...

class Reliability(_message.Message):
    __slots__ = ("band", "error", "counts", "confidences", "accepted")
    BAND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    band: str
    error: float
    counts: _containers.RepeatedScalarFieldContainer[float]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    accepted: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, band: _Optional[str] = ..., error: _Optional[float] = ..., counts: _Optional[_Iterable[float]] = ..., confidences: _Optional[_Iterable[float]] = ..., accepted: _Optional[_Iterable[float]] = ...) -> None: ...
