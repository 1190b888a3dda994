"""The tensors of an ``mmproj`` file under the names that they have in the original model's checkpoint."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.models.formats.gguf_projector import Projector

__all__ = ["projector_tensors"]

_SIGLIP: Final = (
    ("v.patch_embd", "{}embeddings.patch_embedding"),
    ("v.position_embd", "{}embeddings.position_embedding"),
    ("v.post_ln", "{}post_layernorm"),
    (r"v.blk.(\d+).attn_([qkv])", r"{}encoder.layers.\1.self_attn.\2_proj"),
    (r"v.blk.(\d+).attn_out", r"{}encoder.layers.\1.self_attn.out_proj"),
    (r"v.blk.(\d+).ln([12])", r"{}encoder.layers.\1.layer_norm\2"),
    (r"v.blk.(\d+).ffn_up", r"{}encoder.layers.\1.mlp.fc1"),
    (r"v.blk.(\d+).ffn_down", r"{}encoder.layers.\1.mlp.fc2"),
)
_PATCHES: Final = (
    (r"v.patch_embd", "{}patch_embed.proj"),
    (r"v.blk.(\d+).attn_(qkv|q|k|v)", r"{}blocks.\1.attn.\2"),
    (r"v.blk.(\d+).attn_out", r"{}blocks.\1.attn.proj"),
    (r"v.blk.(\d+).ln([12])", r"{}blocks.\1.norm\2"),
)
_NAMES: Final[dict[str, tuple[str, tuple[tuple[str, str], ...]]]] = {
    "gemma3": (
        "vision_tower.",
        (
            *_SIGLIP,
            ("mm.soft_emb_norm", "multi_modal_projector.mm_soft_emb_norm"),
            ("mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight"),
        ),
    ),
    "idefics3": ("model.vision_model.", (*_SIGLIP, ("mm.model.fc", "model.connector.modality_projection.proj"))),
    "internvl": (
        "vision_tower.",
        (
            ("v.class_embd", "{}embeddings.cls_token"),
            ("v.patch_embd", "{}embeddings.patch_embeddings.projection"),
            ("v.position_embd.weight", "{}embeddings.position_embeddings"),
            ("v.post_ln", "{}layernorm"),
            (r"v.blk.(\d+).attn_([qkv])", r"{}encoder.layer.\1.attention.\2_proj"),
            (r"v.blk.(\d+).attn_([qk])_norm", r"{}encoder.layer.\1.attention.\2_norm"),
            (r"v.blk.(\d+).attn_out", r"{}encoder.layer.\1.attention.projection_layer"),
            (r"v.blk.(\d+).ln1", r"{}encoder.layer.\1.layernorm_before"),
            (r"v.blk.(\d+).ln2", r"{}encoder.layer.\1.layernorm_after"),
            (r"v.blk.(\d+).ls([12]).weight", r"{}encoder.layer.\1.lambda_\2"),
            (r"v.blk.(\d+).ffn_up", r"{}encoder.layer.\1.mlp.fc1"),
            (r"v.blk.(\d+).ffn_down", r"{}encoder.layer.\1.mlp.fc2"),
            ("mm.model.mlp.0", "multi_modal_projector.layer_norm"),
            ("mm.model.mlp.1", "multi_modal_projector.linear_1"),
            ("mm.model.mlp.3", "multi_modal_projector.linear_2"),
        ),
    ),
    "pixtral": (
        "vision_tower.",
        (
            ("v.patch_embd", "{}patch_conv"),
            ("v.pre_ln", "{}ln_pre"),
            (r"v.blk.(\d+).attn_([qkv])", r"{}transformer.layers.\1.attention.\2_proj"),
            (r"v.blk.(\d+).attn_out", r"{}transformer.layers.\1.attention.o_proj"),
            (r"v.blk.(\d+).ln1", r"{}transformer.layers.\1.attention_norm"),
            (r"v.blk.(\d+).ln2", r"{}transformer.layers.\1.ffn_norm"),
            (r"v.blk.(\d+).ffn_(gate|up|down)", r"{}transformer.layers.\1.feed_forward.\2_proj"),
            ("v.token_embd.img_break", "{}break"),
            ("mm.input_norm", "multi_modal_projector.norm"),
            ("mm.patch_merger", "multi_modal_projector.patch_merger.merging_layer"),
            ("mm.([12])", r"multi_modal_projector.linear_\1"),
        ),
    ),
    "qwen2vl_merger": (
        "visual.",
        (
            *_PATCHES,
            (r"v.blk.(\d+).ffn_up", r"{}blocks.\1.mlp.fc1"),
            (r"v.blk.(\d+).ffn_down", r"{}blocks.\1.mlp.fc2"),
            ("v.post_ln", "{}merger.ln_q"),
            (r"mm.([02])", r"{}merger.mlp.\1"),
        ),
    ),
    "qwen2.5vl_merger": (
        "visual.",
        (
            *_PATCHES,
            (r"v.blk.(\d+).ffn_(gate|up|down)", r"{}blocks.\1.mlp.\2_proj"),
            ("v.post_ln", "{}merger.ln_q"),
            (r"mm.([02])", r"{}merger.mlp.\1"),
        ),
    ),
    "qwen3vl_merger": (
        "model.visual.",
        (
            *_PATCHES,
            (r"v.blk.(\d+).ffn_up", r"{}blocks.\1.mlp.linear_fc1"),
            (r"v.blk.(\d+).ffn_down", r"{}blocks.\1.mlp.linear_fc2"),
            ("v.position_embd", "{}pos_embed"),
            ("v.post_ln", "{}merger.norm"),
            ("mm.0", "{}merger.linear_fc1"),
            ("mm.2", "{}merger.linear_fc2"),
            (r"v.deepstack.(\d+).norm", r"{}deepstack_merger_list.\1.norm"),
            (r"v.deepstack.(\d+).fc([12])", r"{}deepstack_merger_list.\1.linear_fc\2"),
        ),
    ),
}
"""Projector type -> (prefix of the encoder's names, pairs of a regular expression of names in the file, and the name in
a checkpoint)."""


class _Stored:
    """One tensor of a checkpoint, made from tensors of the file. Has the methods of an open safetensors file."""

    def __init__(self, projector: Projector, names: list[str], join: Callable[[list[Tensor]], Tensor]) -> None:
        self._projector = projector
        self._names = names
        self._join = join

    def get_tensor(self, name: str) -> Tensor:
        return self._join([_read(self._projector, each) for each in self._names])

    def get_slice(self, name: str) -> _Stored:
        return self

    def get_dtype(self) -> str:
        """Dtype as safetensors names it. Integers with scales are as exact as float32."""
        kinds = {self._projector.model.info(name).type.name for name in self._names}
        return kinds.pop() if len(kinds) == 1 and kinds <= {"F16", "BF16"} else "F32"


def projector_tensors(projector: Projector) -> dict[str, Any]:
    """Name of a tensor in a checkpoint -> object that reads it. Raises ModelLoadError for an unknown tensor."""
    prefix, names = _NAMES[projector.kind]
    deep = [layer for layer, each in enumerate(_flags(projector)) if each]
    found: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    frames: list[str] = []
    for tensor in projector.model:
        if tensor in ("v.patch_embd.weight", "v.patch_embd.weight.1") and "v.patch_embd.weight.1" in projector.model:
            frames.append(tensor)
            continue
        name = _named(tensor, prefix, names)
        if name is None:
            projector.fail(f"tensor {tensor!r:.200} has no place in this encoder; convert the model again")
        if listed := re.search(r"deepstack_merger_list\.(\d+)", name):
            if int(listed[1]) not in deep:
                projector.fail(f"tensor {tensor!r:.200} is not of a layer in clip.vision.is_deepstack_layers")
            name = name.replace(listed[0], f"deepstack_merger_list.{deep.index(int(listed[1]))}")
        if separate := re.fullmatch(r"(.+\.attn\.)[qkv](\..+)", name):
            parts.setdefault(f"{separate[1]}qkv{separate[2]}", []).append(tensor)
        else:
            found[name] = _Stored(projector, [tensor], _restored(projector, name))
    for name, tensors in parts.items():
        ordered = sorted(tensors, key=lambda tensor: "qkv".index(tensor.split(".")[3][-1]))
        found[name] = _Stored(projector, ordered, torch.cat)
    if frames:
        name = f"{prefix}patch_embed.proj.weight"
        found[name] = _Stored(projector, sorted(frames), lambda both: torch.stack(both, 2))
    return _unswapped(projector, found)


def _flags(projector: Projector) -> list[Any]:
    return projector.numbers("is_deepstack_layers") if projector.kind == "qwen3vl_merger" else []


def _named(tensor: str, prefix: str, names: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, name in names:
        whole = re.fullmatch(rf"{pattern.replace('.', '[.]')}([.](?:weight|bias))?", tensor)
        if whole:
            return whole.expand(name.replace("{}", prefix)) + (whole[whole.re.groups] or "")
    return None


def _unswapped(projector: Projector, found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with the two layers of each MLP exchanged, in files of older converters, which name them so."""
    up = "v.blk.0.ffn_up.weight"
    if up not in projector.model or ".gate_proj." in "".join(found):
        return found
    # The key feed_forward_length may be 0 or wrong, so the shape decides.
    rows, columns = projector.sides(up)
    if rows != projector.number("embedding_length") or rows == columns:
        return found
    other = {"fc1": "fc2", "fc2": "fc1"}
    return {
        re.sub(r"(?<=\.mlp\.)(linear_)?(fc[12])", lambda part: (part[1] or "") + other[part[2]], name): each
        for name, each in found.items()
    }


def _read(projector: Projector, name: str) -> Tensor:
    info = projector.model.info(name)
    return torch.from_numpy(projector.model.read(name, 0, info.rows)).reshape(info.shape)


def _restored(projector: Projector, name: str) -> Callable[[list[Tensor]], Tensor]:
    """Function that undoes the converter's change of the tensor ``name`` of a checkpoint."""
    if name.endswith("emb_norm.weight"):
        return lambda tensors: tensors[0] - 1.0
    if projector.kind == "pixtral" and name.endswith((".q_proj.weight", ".k_proj.weight")):
        return functools.partial(_in_halves, heads=projector.number("attention.head_count"))
    if name.endswith("embeddings.cls_token"):
        return lambda tensors: tensors[0].reshape(1, 1, -1)
    if name.endswith("embeddings.position_embeddings"):
        return lambda tensors: tensors[0].reshape(1, *tensors[0].shape[-2:])
    return lambda tensors: tensors[0]


def _in_halves(tensors: list[Tensor], heads: int) -> Tensor:
    """A matrix whose rows are in the order of the checkpoint: those that are rotated together are in the two halves of
    a head, and neighbours in the file."""
    (matrix,) = tensors
    if matrix.dim() != 2 or len(matrix) % (2 * heads):  # the encoder refuses this shape
        return matrix
    return matrix.reshape(heads, -1, 2, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)
