"""The protobuf messages of Tinker's API (client 0.38): training data, their results, and samples.

Protobuf sends numbers of fields and no names, so the messages are declared here by their numbers. They have a pool of
their own, apart from that of a process which also imports the client.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from automodel_rl.errors import InputError
from automodel_rl.rollout.sampled import Sampled
from automodel_rl.serve.messages import Datum

PACKAGE = "automodel_rl"

FIELDS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Csr": ((1, "values", "bytes"),),
    "Array": ((1, "dense", "bytes"), (2, "csr", "Csr"), (3, "dtype", "int32"), (4, "shape", "repeated int64")),
    "Text": ((1, "tokens", "bytes"),),
    "Chunk": ((1, "text", "Text"),),
    "Datum": ((1, "chunks", "repeated Chunk"), (2, "inputs", "map Array")),
    "Setting": ((1, "number", "optional double"), (2, "text", "optional string")),
    "Request": (
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "repeated Datum"),
        (4, "loss_fn", "string"),
        (6, "forward_only", "bool"),
        (7, "settings", "map Setting"),
    ),
    "Rows": ((1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"), (4, "trailing", "repeated int64")),
    "Record": ((1, "tag", "string"), (2, "fields", "map Rows"), (3, "num_datums", "int64")),
    "Output": ((1, "type", "string"), (2, "records", "repeated Record"), (3, "metrics", "map double")),
    "Sequence": ((1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "optional bytes")),
    "Samples": ((1, "sequences", "repeated Sequence"), (2, "prompt_logprobs", "optional bytes")),
}
"""The fields of each message: number, name and kind. A kind may be that of another message."""

FLOAT32, INT64 = 1, 2
DTYPES: dict[int, np.dtype] = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
STOP_REASONS = {"stop": 0, "length": 1}

_KINDS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
}


def _declare() -> dict[str, Any]:
    """The message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for title, fields in FIELDS.items():
        message = file.message_type.add(name=title)
        for number, name, kind in fields:
            _add(message, number, name, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {t: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{t}")) for t in FIELDS}


def _add(message: Any, number: int, name: str, kind: str) -> None:
    """Declares a field of a message."""
    how, _, kind = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    if how == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")  # the name that protobuf gives a map's pairs
        entry.options.map_entry = True
        _add(entry, 1, "key", "string")
        _add(entry, 2, "value", kind)
        kind = f"{message.name}.{entry.name}"
    if how in ("map", "repeated"):
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    if how == "optional":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


MESSAGES = _declare()


def read_request(body: bytes) -> Any:
    """The message of a forward and backward.

    Raises:
        InputError: these bytes are none.
    """
    try:
        return MESSAGES["Request"].FromString(body)
    except DecodeError:
        raise InputError("the body is no forward_backward request in protobuf: use tinker 0.38") from None


def read_datum(message: Any) -> Datum:
    """A datum with its arrays.

    Raises:
        InputError: an array is damaged, or there is something else than text.
    """
    if any(not chunk.HasField("text") for chunk in message.chunks):
        raise InputError("model_input has a chunk that is not text: images and sound are not served")
    chunks = [_from_bytes(chunk.text.tokens, np.dtype(np.int32), "model_input") for chunk in message.chunks]
    tokens = np.concatenate([np.empty(0, np.int32), *chunks]).astype(np.int64)
    return Datum(tokens, {name: _read_array(name, array) for name, array in message.inputs.items()})


def _read_array(name: str, message: Any) -> np.ndarray:
    shape = tuple(message.shape)
    if message.dtype not in DTYPES or any(size < 0 for size in shape):
        raise InputError(f"{name} has dtype {message.dtype} and shape {list(shape)}: it is float32 or int64")
    dtype = DTYPES[message.dtype]
    if message.HasField("csr") or len(shape) > 1:
        raise InputError(f"{name} has the shape {list(shape)}: several targets for a position are not served, give one")
    values = _from_bytes(message.dense, dtype, name)
    if shape and shape[0] != len(values):
        raise InputError(f"{name} has {len(values)} values for the shape {list(shape)}")
    return values


def _from_bytes(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InputError(f"{name} has {len(data)} bytes, which are no array of {dtype}")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The result of a forward and backward.

    Args:
        logprobs: log-probabilities of the targets of each datum, float32.
        metrics: metrics by name; a name ends with how the client joins several of them, as in `loss:sum`.
    """
    output = MESSAGES["Output"](type="ArrayRecord", metrics=metrics)
    for values in logprobs:
        offsets = np.array([0, values.nbytes], np.int64).tobytes()
        rows = MESSAGES["Rows"](data=values.tobytes(), offsets=offsets, dtype=FLOAT32, trailing=values.shape[1:])
        output.records.add(num_datums=1).fields["logprobs"].CopyFrom(rows)
    return output.SerializeToString()


def write_samples(sampled: Sampled) -> bytes:
    """The result of a sample."""
    message = MESSAGES["Samples"]()
    for sequence in sampled.sequences:
        message.sequences.add(
            stop_reason=STOP_REASONS[sequence.finish],
            tokens=np.array(sequence.tokens, np.int32).tobytes(),
            logprobs=np.array(sequence.logprobs, np.float32).tobytes(),
        )
    if sampled.prompt_logprobs is not None:
        known = np.asarray(sampled.prompt_logprobs, np.float32).copy()
        known[0] = np.nan  # nothing predicts the first token
        message.prompt_logprobs = known.tobytes()
    return message.SerializeToString()
