"""Protocol Buffers messages of the ``tinker`` client: passes over data, their outputs, and samples.

The messages are declared here by their field numbers, so nothing is generated. They live in a descriptor pool of their
own, because a process may have the client's declarations, too.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = [
    "DTYPES",
    "ForwardBackwardOutputMessage",
    "ForwardBackwardRequestMessage",
    "SampleResponseMessage",
]

_PACKAGE: Final = "chairlift.training"
_TYPES: Final = descriptor_pb2.FieldDescriptorProto
_KINDS: Final = {
    "bytes": _TYPES.TYPE_BYTES,
    "string": _TYPES.TYPE_STRING,
    "bool": _TYPES.TYPE_BOOL,
    "int32": _TYPES.TYPE_INT32,
    "int64": _TYPES.TYPE_INT64,
    "uint32": _TYPES.TYPE_UINT32,
    "double": _TYPES.TYPE_DOUBLE,
}
DTYPES: Final = {1: "<f4", 2: "<i8", 3: "<i4"}
"""Number of an element type -> NumPy's name of it."""

_MESSAGES: Final[dict[str, str]] = {
    "SampleResponse": (
        "repeated SampledSequence sequences=1; optional bytes prompt_logprobs=2;"
        " TopkLogprobs topk_prompt_logprobs=3; int32 prompt_cache_hit_tokens=4"
    ),
    "SampledSequence": (
        "int32 stop_reason=1; bytes tokens=2; optional bytes logprobs=3; TopkLogprobs topk_sampled_logprobs=4"
    ),
    "TopkLogprobs": "bytes token_ids=1; bytes logprobs=2; uint32 k=3; uint32 length=4",
    "SparseCsr": "bytes values=1; bytes crow_indices=2; bytes col_indices=3",
    "Tensor": "optional bytes dense=1; SparseCsr sparse_csr=2; int32 dtype=3; repeated int64 shape=4",
    "BatchedTensor": "bytes data=1; bytes offsets=2; int32 dtype=3; repeated int64 trailing_shape=4",
    "ArrayRecord": "string type_tag=1; map BatchedTensor fields=2; int64 num_datums=3",
    "ForwardBackwardOutput": (
        "string loss_fn_output_type=1; repeated ArrayRecord loss_fn_outputs=2; map double metrics=3"
    ),
    "ForwardBackwardRequest": (
        "string model_id=1; int32 seq_id=2; repeated Datum data=3; string loss_fn=4; map double loss_fn_config=5;"
        " bool forward_only=6; map LossConfigValue loss_fn_config_v2=7"
    ),
    "LossConfigValue": "optional double number=1; optional string text=2",
    "Datum": "repeated Chunk model_input=1; map Tensor loss_fn_inputs=2",
    "Chunk": "EncodedTextChunk encoded_text=1; ImageChunk image=2; DmelChunk dmel=3",
    "EncodedTextChunk": "bytes tokens=1",
    "ImageChunk": "bytes data=1; string format=2",
    "DmelChunk": "bytes dmel=1",
}
"""Message -> its fields. An enumeration is declared as int32, which has the same encoding."""


def _declare(file: descriptor_pb2.FileDescriptorProto, name: str, fields: str) -> None:
    message = file.message_type.add(name=name)
    for entry in fields.split(";"):
        kind, _, rest = entry.strip().partition(" ")
        label = _TYPES.LABEL_OPTIONAL
        repeated = kind == "repeated"
        presence = kind == "optional"
        if repeated or presence or kind == "map":
            mapped = kind == "map"
            kind, _, rest = rest.partition(" ")
            label = _TYPES.LABEL_REPEATED if repeated or mapped else label
            if mapped:
                kind = _declare_entry(message, rest.partition("=")[0], kind)
        field, _, number = rest.partition("=")
        _add(message, field, int(number), kind, label, presence=presence)


def _add(message: Any, name: str, number: int, kind: str, label: Any, *, presence: bool = False) -> None:
    added = message.field.add(name=name, number=number, label=label)
    if kind in _KINDS:
        added.type = _KINDS[kind]
    else:
        added.type = _TYPES.TYPE_MESSAGE
        added.type_name = f".{_PACKAGE}.{kind}"
    if presence:  # proto3 tells a missing value from an empty one by a oneof with a single member
        added.proto3_optional = True
        added.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _declare_entry(message: Any, field: str, kind: str) -> str:
    """Declare the entries of a map from text to ``kind``. Returns their type."""
    name = "".join(part.capitalize() for part in field.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    _add(entry, "key", 1, "string", _TYPES.LABEL_OPTIONAL)
    _add(entry, "value", 2, kind, _TYPES.LABEL_OPTIONAL)
    return f"{message.name}.{name}"


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="chairlift/training.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        _declare(file, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL: Final = _pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequestMessage: Final = _message("ForwardBackwardRequest")
ForwardBackwardOutputMessage: Final = _message("ForwardBackwardOutput")
SampleResponseMessage: Final = _message("SampleResponse")
