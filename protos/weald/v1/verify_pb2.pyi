from weald.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("open", "proposals", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    proposals: Proposals
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., proposals: _Optional[_Union[Proposals, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("features", "replies", "failure", "draining")
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    features: Features
    replies: Replies
    failure: Failure
    draining: Draining
    def __init__(self, features: _Optional[_Union[Features, _Mapping]] = ..., replies: _Optional[_Union[Replies, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "epoch", "tokens", "prompt_length", "params", "seed", "fingerprint", "speculative", "features_from", "traceparent", "priced", "priority")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRICED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    params: _session_pb2.SamplingParams
    seed: int
    fingerprint: bytes
    speculative: bool
    features_from: int
    traceparent: str
    priced: bool
    priority: _session_pb2.Priority
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., params: _Optional[_Union[_session_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., speculative: _Optional[bool] = ..., features_from: _Optional[int] = ..., traceparent: _Optional[str] = ..., priced: _Optional[bool] = ..., priority: _Optional[_Union[_session_pb2.Priority, str]] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("sessions", "epochs", "rounds", "root_positions", "sizes", "tokens", "parents", "confidences")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    rounds: _containers.RepeatedScalarFieldContainer[int]
    root_positions: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., epochs: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Iterable[int]] = ..., root_positions: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("session", "epoch", "start", "rows", "width", "dtype", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    start: int
    rows: int
    width: int
    dtype: _session_pb2.FeatureDtype
    data: bytes
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., rows: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[_session_pb2.FeatureDtype, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("sessions", "epochs", "rounds", "positions", "token_counts", "tokens", "accepted_counts", "accepted", "finishes", "nodes", "wanted", "turnarounds_ns", "feature_starts", "feature_rows", "feature_width", "feature_dtype", "feature_data", "timings", "load", "logprob_counts", "logprobs", "prices", "paces", "arrived_unix_ns")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TURNAROUNDS_NS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_STARTS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DATA_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRICES_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    rounds: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_counts: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    finishes: _containers.RepeatedScalarFieldContainer[_session_pb2.FinishReason]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    wanted: _containers.RepeatedScalarFieldContainer[bool]
    turnarounds_ns: _containers.RepeatedScalarFieldContainer[int]
    feature_starts: _containers.RepeatedScalarFieldContainer[int]
    feature_rows: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    feature_dtype: _session_pb2.FeatureDtype
    feature_data: bytes
    timings: StepTimings
    load: _session_pb2.Load
    logprob_counts: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _session_pb2.Logprobs
    prices: _containers.RepeatedScalarFieldContainer[float]
    paces: _containers.RepeatedScalarFieldContainer[float]
    arrived_unix_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., epochs: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted_counts: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[_session_pb2.FinishReason, str]]] = ..., nodes: _Optional[_Iterable[int]] = ..., wanted: _Optional[_Iterable[bool]] = ..., turnarounds_ns: _Optional[_Iterable[int]] = ..., feature_starts: _Optional[_Iterable[int]] = ..., feature_rows: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., feature_dtype: _Optional[_Union[_session_pb2.FeatureDtype, str]] = ..., feature_data: _Optional[bytes] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., load: _Optional[_Union[_session_pb2.Load, _Mapping]] = ..., logprob_counts: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_session_pb2.Logprobs, _Mapping]] = ..., prices: _Optional[_Iterable[float]] = ..., paces: _Optional[_Iterable[float]] = ..., arrived_unix_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "accept_ns", "commit_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_NS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    accept_ns: int
    commit_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., accept_ns: _Optional[int] = ..., commit_ns: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("session", "epoch", "error")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    error: _session_pb2.Error
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., error: _Optional[_Union[_session_pb2.Error, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceStatusResponse(_message.Message):
    __slots__ = ("model", "fingerprint", "dtype", "device", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size", "num_pages", "load", "counters", "cost")
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
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: bytes
    dtype: str
    device: str
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    load: _session_pb2.Load
    counters: _containers.ScalarMap[str, int]
    cost: _containers.ScalarMap[int, float]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., load: _Optional[_Union[_session_pb2.Load, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., cost: _Optional[_Mapping[int, float]] = ...) -> None: ...
