"""Protobuf messages of Tinker's API (client 0.38): training data, their results, and samples.

Protobuf sends field numbers without names, so messages are declared here by number. They use a separate descriptor
pool, so that the client can be imported in the same process.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from automodel_rl.errors import InputError
from automodel_rl.rollout.sampled import PromptScoring, Sampled, ScoredTokens
from automodel_rl.serve.arrays import SparsePositions, array_of
from automodel_rl.serve.messages import Datum

PACKAGE = "automodel_rl"

FIELDS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Csr": ((1, "values", "bytes"), (2, "row_ends", "bytes"), (3, "columns", "bytes")),
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
    "Top": ((1, "ids", "bytes"), (2, "logprobs", "bytes"), (3, "k", "uint32"), (4, "length", "uint32")),
    "Sequence": (
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "optional bytes"),
        (4, "top", "Top"),
    ),
    "Samples": (
        (1, "sequences", "repeated Sequence"),
        (2, "prompt_logprobs", "optional bytes"),
        (3, "prompt_top", "Top"),
        (5, "prompt_at", "Array"),
    ),
}
"""Fields of each message: number, name and type, which may be another message."""

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
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
}


def _declare() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for title, fields in FIELDS.items():
        message = file.message_type.add(name=title)
        for number, name, kind in fields:
            _add(message, number, name, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {t: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{t}")) for t in FIELDS}


def _add(message: Any, number: int, name: str, kind: str) -> None:
    how, _, kind = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    if how == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")  # protobuf's name for map entries
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
    """Parses a forward-backward request. Raises InputError if it is not one."""
    try:
        return MESSAGES["Request"].FromString(body)
    except DecodeError:
        raise InputError("the body is not a forward_backward request in protobuf: use tinker 0.38") from None


def bytes_of_arrays(message: Any) -> int:
    """Size of a request's sparse arrays once they are dense."""
    arrays = (array for datum in message.data for array in datum.inputs.values() if array.HasField("csr"))
    return sum(8 * math.prod(array.shape) for array in arrays)


def read_data(messages: Sequence[Any], most: int, max_bytes: int) -> list[Datum]:
    """Decodes datums.

    Args:
        most: most datums.
        max_bytes: most bytes of all arrays together, as sparse ones are small in messages.

    Raises:
        InputError: there are too many, or one is damaged, too large, or not text.
    """
    if len(messages) > most:
        raise InputError(f"{len(messages)} datums: a request has 1 to {most} (limits.sequences)")
    found, left = [], max_bytes
    for message in messages:
        found.append(read_datum(message, left))
        left -= sum(array.nbytes for array in found[-1].inputs.values())
    return found


def read_datum(message: Any, max_bytes: int) -> Datum:
    """Decodes a datum, whose arrays may have at most `max_bytes` bytes each. Raises InputError as `read_data`."""
    if any(not chunk.HasField("text") for chunk in message.chunks):
        raise InputError("model_input has a chunk that is not text: images and sound are not supported")
    chunks = [_from_bytes(chunk.text.tokens, np.dtype(np.int32), "model_input") for chunk in message.chunks]
    tokens = np.concatenate([np.empty(0, np.int32), *chunks]).astype(np.int64)
    return Datum(tokens, {name: _read_array(name, array, max_bytes) for name, array in message.inputs.items()})


def _read_array(name: str, message: Any, max_bytes: int) -> np.ndarray:
    if message.dtype not in DTYPES:
        raise InputError(f"{name} has dtype {message.dtype}: must be float32 (1) or int64 (2)")
    dtype, positions = DTYPES[message.dtype], None
    if message.HasField("csr"):
        index = np.dtype(np.int64)
        positions = SparsePositions(
            _from_bytes(message.csr.row_ends, index, name), _from_bytes(message.csr.columns, index, name)
        )
    values = _from_bytes(message.dense if positions is None else message.csr.values, dtype, name)
    # Targets and weights may list different entries; each is 0 elsewhere, as it was at the client.
    return array_of(values, message.shape, positions, 0, max_bytes, name)


def _from_bytes(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InputError(f"{name} has {len(data)} bytes, which are not an array of {dtype}")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encodes the result of a forward-backward.

    Args:
        logprobs: log-probabilities of each datum's targets, float32.
        metrics: a name's suffix, as in `loss:sum`, tells the client how to reduce several values.
    """
    output = MESSAGES["Output"](type="ArrayRecord", metrics=metrics)
    for values in logprobs:
        offsets = np.array([0, values.nbytes], np.int64).tobytes()
        rows = MESSAGES["Rows"](data=values.tobytes(), offsets=offsets, dtype=FLOAT32, trailing=values.shape[1:])
        output.records.add(num_datums=1).fields["logprobs"].CopyFrom(rows)
    return output.SerializeToString()


def write_samples(sampled: Sampled, scoring: PromptScoring, positions: SparsePositions | None = None) -> bytes:
    """Encodes the result of a sample.

    Args:
        scoring: the requested scores of the prompt.
        positions: positions of the tokens that the client listed, if its array was sparse.
    """
    message = MESSAGES["Samples"]()
    for place, sequence in enumerate(sampled.sequences):
        message.sequences.add(
            stop_reason=STOP_REASONS[sequence.finish],
            tokens=np.array(sequence.tokens, np.int32).tobytes(),
            logprobs=np.array(sequence.logprobs, np.float32).tobytes(),
        )
        if sampled.scored:
            scored, start = sampled.scored[place], -len(sequence.tokens)
            of_sequence = ScoredTokens(
                *(rows[start:] for rows in (scored.logprobs, scored.top_logprobs, scored.top_ids))
            )
            message.sequences[place].top.CopyFrom(_top(of_sequence, of_sequence.top_ids.shape[1], 0))
    prompt = sampled.prompt
    if prompt.logprobs is not None:
        known = np.asarray(prompt.logprobs, np.float32).copy()
        known[: scoring.first] = np.nan
        message.prompt_logprobs = known.tobytes()
    if prompt.top is not None:
        message.prompt_top.CopyFrom(_top(prompt.top, scoring.num_top, scoring.first))
    if prompt.at is not None:
        message.prompt_at.CopyFrom(_array(prompt.at, positions))
    return message.SerializeToString()


NOTHING = -99999.0
"""Log-probability of an empty slot in a list of most likely tokens. Its id is 0."""


def _top(scored: ScoredTokens, k: int, first: int) -> Any:
    """Encodes the most likely tokens of each position, empty before `first`. A vocabulary may have fewer than k."""
    ids = np.zeros((len(scored.top_ids), k), np.int32)
    logprobs = np.full(ids.shape, NOTHING, np.float32)
    width = min(k, scored.top_ids.shape[1])
    ids[first:, :width] = scored.top_ids[first:, :width]
    logprobs[first:, :width] = scored.top_logprobs[first:, :width]
    return MESSAGES["Top"](ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(ids))


def _array(values: np.ndarray, positions: SparsePositions | None) -> Any:
    """Encodes a float32 array, with only its listed entries if it is sparse."""
    values = np.ascontiguousarray(values, np.float32)
    if positions is None:
        return MESSAGES["Array"](dense=values.tobytes(), dtype=FLOAT32, shape=values.shape)
    listed = values[positions.rows, positions.columns].tobytes()
    csr = MESSAGES["Csr"](values=listed, row_ends=positions.row_ends.tobytes(), columns=positions.columns.tobytes())
    return MESSAGES["Array"](csr=csr, dtype=FLOAT32, shape=values.shape)
