"""EAGLE-3: one decoder layer that drafts tokens from hidden states of the served model (Li et al., 2025).

The layer's input at position p is the embedding of token p + 1 and a feature of position p, and its result predicts
token p + 2. Where the served model has computed position p, the feature is a projection of the hidden states before
some of its layers (the taps). After the newest known token, the feature is the layer's own previous result.

Files: ``config.json`` and ``*.safetensors`` as the authors of EAGLE-3 publish them (``LlamaForCausalLMEagle3``), or as
the library speculators writes them. The output head may have a reduced vocabulary: ``d2t`` is the difference between
a token's id in the model and its row in this head.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chairlift.errors import ModelLoadError
from chairlift.kernels import ops
from chairlift.kernels.weights import PLAIN, WeightFormat
from chairlift.models.causal_lm import CausalLM, lay_out_layers, lay_out_rest
from chairlift.models.context import AttentionContext, LayerCache, LayerState
from chairlift.models.hf_config import NetworkConfig, parse_config, read_json
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.linear import Linear, Matrix, TokenEmbedding
from chairlift.models.layers.mlp import MLP
from chairlift.models.layers.norm import RMSNorm
from chairlift.models.layers.rotary import RotaryEmbedding
from chairlift.models.loader import open_safetensors

__all__ = [
    "Eagle3",
    "Eagle3Config",
    "hidden_at",
    "load_eagle3",
    "parse_eagle3_config",
    "read_eagle3_config",
    "stored_tensors",
]

_ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
_UNSUPPORTED: Final = ("fc_norm", "attention_bias", "mlp_bias")
"""Keys of ``config.json`` that must not be true, because the change of the network that they ask for is not
supported."""
_MAX_TAPS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of the drafting layer, and how it is connected to the served model."""

    layer: NetworkConfig
    """Config of a Llama model with one layer, and the served model's vocabulary."""
    draft_vocab_size: int
    """Number of rows of the drafting layer's output head."""
    taps: tuple[int, ...]
    """Indices of layers of the served model. The hidden states before these layers are the input from which features
    are computed."""
    target_hidden_size: int
    """Width of the served model's hidden states."""
    norm_before_residual: bool = False
    """Whether the residual stream of the layer begins with the normalised feature."""
    norm_before_fc: bool = False
    """Whether the served model's hidden states are normalised before their projection."""
    norm_output: bool = False
    """Whether the feature of the next position is the layer's result after a norm. Otherwise it is the result
    itself."""


def read_eagle3_config(folder: Path, target: NetworkConfig) -> Eagle3Config:
    """Read ``config.json`` of a drafting layer for the served model ``target``. Raises ModelLoadError."""
    path = folder / "config.json"
    if not path.is_file():
        found = "is a file" if folder.is_file() else "has no config.json"
        raise ModelLoadError(f"{folder} {found}; give the directory of an EAGLE-3 draft, with config.json and weights")
    return parse_eagle3_config(read_json(path), target, path)


def parse_eagle3_config(raw: Mapping[str, Any], target: NetworkConfig, path: Path) -> Eagle3Config:
    """Parse the content of a drafting layer's ``config.json``. ``path`` is named in errors. Raises ModelLoadError."""
    named = [str(name) for name in raw.get("architectures") or ()]
    if not any(name in _ARCHITECTURES for name in named) and raw.get("speculators_model_type") != "eagle3":
        raise ModelLoadError(f"{path}: architectures {named!r:.80} is not EAGLE-3's ({_ARCHITECTURES[0]}); use another")
    nested = raw.get("transformer_layer_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    eagle = raw.get("eagle_config")
    said = {**raw, **eagle} if isinstance(eagle, Mapping) else raw
    if name := next((key for key in _UNSUPPORTED if said.get(key) or inner.get(key)), None):
        raise ModelLoadError(f"{path}: {name} is set, which is not supported for EAGLE-3 drafts; use another")
    kept = {key: value for key, value in inner.items() if key not in ("architectures", "auto_map")}
    kept |= {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": target.vocab_size}
    kept["tie_word_embeddings"] = False
    layer = parse_config({"hidden_act": "silu", "rms_norm_eps": 1e-6, **kept}, where=str(path))
    if inner.get("vocab_size", target.vocab_size) != target.vocab_size:
        raise ModelLoadError(
            f"{path}: vocab_size is {inner['vocab_size']!r:.40}, and the model has {target.vocab_size} tokens; use a"
            " draft that was trained for it"
        )
    given = raw.get("target_hidden_size")
    if given is not None and given != target.hidden_size:
        raise ModelLoadError(
            f"{path}: target_hidden_size is {given!r:.40}, and the model's hidden size {target.hidden_size}; use a"
            " draft that was trained for it"
        )
    size = raw.get("draft_vocab_size")
    size = target.vocab_size if size is None else size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= target.vocab_size:
        raise ModelLoadError(
            f"{path}: draft_vocab_size must be a whole number from 1 to {target.vocab_size}, got {size!r:.80}"
        )
    # If a file of the library speculators does not have this key, its value is true, as in vLLM.
    before = said.get("norm_before_residual", nested is not None)
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=size,
        taps=_taps(said.get("eagle_aux_hidden_state_layer_ids"), path, target.num_hidden_layers),
        target_hidden_size=target.hidden_size,
        norm_before_residual=bool(before),
        norm_before_fc=bool(said.get("norm_before_fc", False)),
        norm_output=bool(said.get("norm_output", False)),
    )


def _taps(ids: Any, path: Path, num_layers: int) -> tuple[int, ...]:
    """Layers of the served model before which hidden states are read.

    Two conventions are in use. In most files, id X stands for the input of layer X. Files whose first id is 1 count
    outputs: in these files, X stands for the output of layer X, which is the input of layer X + 1.
    """
    if not ids:
        if num_layers < 4:
            raise ModelLoadError(
                f"{path} has no eagle_aux_hidden_state_layer_ids, and the default needs a model of at least 4 layers;"
                f" this one has {num_layers}: add the key to eagle_config"
            )
        return 2, num_layers // 2, num_layers - 3
    whole = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    taps = [each + (ids[0] == 1) for each in ids] if whole else []
    if not 1 <= len(taps) <= _MAX_TAPS or not all(0 <= each < num_layers for each in taps):
        raise ModelLoadError(
            f"{path}: eagle_aux_hidden_state_layer_ids must list 1 to {_MAX_TAPS} layers of the model, which has"
            f" {num_layers}; got {ids!r:.80}"
        )
    return tuple(taps)


class _PairAttention(Attention):
    """Self-attention with two inputs: rows of an embedding and rows of a feature. q, k and v are linear in both
    inputs."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config, 0)
        self.feature_proj = Linear(config.hidden_size, self.width)

    def forward(  # type: ignore[override]
        self, embedded: Tensor, feature: Tensor, rotary: ops.Rotary | None, ctx: AttentionContext
    ) -> Tensor:
        product: Tensor = self.feature_proj(feature)
        qkv = product + self.qkv_proj(embedded)
        q, k, v = ops.rotary_heads(qkv, rotary, self.num_heads, self.num_kv_heads, self.head_dim)
        out: Tensor = self.o_proj(ctx.attend(0, q, k, v, scale=self.scale, window=self.window).flatten(1))
        return out


class Eagle3(nn.Module):
    """The drafting layer with its output head."""

    target_ids: npt.NDArray[np.int32] | None = None
    """int32 [rows of the output head]: for each row, the token id in the served model's vocabulary, ascending. None:
    row i stands for token id i."""

    def __init__(self, config: Eagle3Config, *, own_embedding: bool, own_head: bool) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        hidden = layer.hidden_size
        eps = layer.norm_eps
        fed = len(config.taps) * config.target_hidden_size
        self.input_norm = RMSNorm(fed, eps) if config.norm_before_fc else None
        self.fc = Linear(fed, hidden)
        self.embed_tokens = TokenEmbedding(layer.vocab_size, hidden) if own_embedding else None
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = _PairAttention(layer)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(layer)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size) if own_head else None
        ropes = [rope for rope in layer.layer_ropes if rope is not None]
        self.rotary = RotaryEmbedding(layer.head_dim, ropes[0], layer.max_position_embeddings)

    def project(self, features: Tensor) -> Tensor:
        """Compute features [T, D] from the served model's hidden states before the tapped layers [T, taps * D of the
        model]."""
        projected: Tensor = self.fc(features if self.input_norm is None else self.input_norm(features))
        return projected

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(features of the next positions, hidden states for the output head), each [T, D]. ``embedded`` [T, D] are
        embeddings of the tokens after ``positions``."""
        normed = self.hidden_norm(features)
        rotary = self.rotary(positions, features.dtype)
        attended = self.self_attn(self.input_layernorm(embedded), normed, rotary, ctx)
        hidden = (normed if self.config.norm_before_residual else features) + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        out: Tensor = self.norm(hidden)
        return (out if self.config.norm_output else hidden), out

    def kv_cache_spec(self) -> list[LayerCache | LayerState]:
        """Shape of the KV cache of the drafting layer."""
        layer = self.config.layer
        return [LayerCache(layer.num_key_value_heads, layer.head_dim, None)]


def hidden_at(model: CausalLM, taps: Sequence[int], token_ids: Any, positions: Any, ctx: Any) -> tuple[Any, list[Any]]:
    """Run the served model on a flat batch. Returns (last hidden states, hidden states before each decoder layer in
    ``taps``, in the order of ``taps``), each [T, D]. The number of layers stands for the last norm. ``ctx`` is an
    AttentionContext, or a recorder; with a recorder, the results are symbols."""
    found: dict[int, Any] = {}
    hooks = []
    for tap in set(taps):

        def note(_: Any, given: tuple[Any, ...], tap: int = tap) -> None:
            found[tap] = given[0]

        layers = model.model.layers
        place: Any = layers[tap] if tap < len(layers) else model.model.norm
        hooks.append(place.register_forward_pre_hook(note))
    try:
        hidden = model(token_ids, positions, ctx)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, [found[tap] for tap in taps]


def load_eagle3(folder: Path, target: NetworkConfig, dtype: torch.dtype, weight_format: WeightFormat) -> Eagle3:
    """Read a drafting layer for the served model ``target``, with its matrices in ``weight_format``. Raises
    ModelLoadError."""
    config = read_eagle3_config(folder, target)
    with contextlib.ExitStack() as stack:
        files = {_own_name(name): (name, file) for name, file in open_safetensors(folder, stack).items()}
        for name in ("lm_head.weight", "embed_tokens.weight"):
            wide = config.draft_vocab_size if name == "lm_head.weight" else target.vocab_size
            if name not in files and (wide, config.layer.hidden_size) != (target.vocab_size, target.hidden_size):
                raise ModelLoadError(f"{folder} lacks {name!r}, and the model's has another shape; download it again")
        with torch.device("meta"):
            own = {"own_embedding": "embed_tokens.weight" in files, "own_head": "lm_head.weight" in files}
            network = Eagle3(config, **own)
        linears = [each for each in network.modules() if isinstance(each, Linear)]
        formats: dict[Matrix, WeightFormat] = dict.fromkeys(linears, weight_format)
        if network.embed_tokens is not None:
            formats[network.embed_tokens] = PLAIN
        lay_out_layers(formats, dtype, torch.device("cpu"))
        lay_out_rest(network, dtype, torch.device("cpu"))
        _write(network, files, folder)
        network.target_ids = _target_ids(files, config, folder)
    return network.eval().requires_grad_(False)


_Files = Mapping[str, tuple[str, Any]]
"""Name of a tensor without the prefix of its layer -> (name of the tensor in the file, the open file)."""


def _own_name(name: str) -> str:
    """Name of a stored tensor without the prefix of its layer: ``midlayer.`` in the authors' files, ``layers.0.`` in
    others."""
    return name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")


class _Piece(NamedTuple):
    """Part of a stored tensor, and the layer's weight into which it is written."""

    layer: Matrix
    row: int
    """First row that the part fills in the layer's weight."""
    rows: int
    column: int
    """First column of the part in the stored tensor."""
    columns: int


def _pieces(network: Eagle3) -> dict[str, list[_Piece]]:
    """Name of a stored matrix -> its parts. The parts are adjacent ranges of columns of the matrix."""
    layer = network.config.layer
    attention = network.self_attn
    mlp = network.mlp
    hidden = layer.hidden_size
    inner = layer.intermediate_size
    kv = layer.num_key_value_heads * layer.head_dim
    width = layer.num_attention_heads * layer.head_dim
    found: dict[str, list[_Piece]] = {}
    for name, row, rows in (("q", 0, width), ("k", width, kv), ("v", width + kv, kv)):
        both = (attention.qkv_proj, attention.feature_proj)
        pieces = [_Piece(matrix, row, rows, at * hidden, hidden) for at, matrix in enumerate(both)]
        found[f"self_attn.{name}_proj.weight"] = pieces
    found["mlp.gate_proj.weight"] = [_Piece(mlp.gate_up_proj, 0, inner, 0, hidden)]
    found["mlp.up_proj.weight"] = [_Piece(mlp.gate_up_proj, inner, inner, 0, hidden)]
    whole: dict[str, Matrix | None] = {
        "self_attn.o_proj": attention.o_proj,
        "mlp.down_proj": mlp.down_proj,
        "fc": network.fc,
        "embed_tokens": network.embed_tokens,
        "lm_head": network.lm_head,
    }
    for name, matrix in whole.items():
        if matrix is not None:
            rows, columns = matrix.shape[:2]
            found[f"{name}.weight"] = [_Piece(matrix, 0, rows, 0, columns)]
    return found


def stored_tensors(network: Eagle3) -> dict[str, Tensor]:
    """Tensors of a drafting layer with plain weights, under the names and in the shapes of the published files. ``d2t``
    (int64) and ``t2d`` (bool) are among them if the output head has a reduced vocabulary."""
    found: dict[str, Tensor] = {}
    for name, pieces in _pieces(network).items():
        parts = [piece.layer.weight.detach()[piece.row : piece.row + piece.rows] for piece in pieces]
        found[_published_name(name)] = torch.cat(parts, dim=1)
    for name, norm in network.named_children():
        if isinstance(norm, RMSNorm):
            found[_published_name(f"{name}.weight")] = norm.weight.detach()
    if network.target_ids is not None:
        ids = torch.from_numpy(network.target_ids.astype(np.int64))
        known = torch.zeros(network.config.layer.vocab_size, dtype=torch.bool)
        found |= {"d2t": ids - torch.arange(len(ids)), "t2d": known.index_fill(0, ids, True)}
    return found


def _published_name(name: str) -> str:
    """Name of a tensor in the authors' files: the inverse of :func:`_own_name`."""
    return name if name.startswith(("fc.", "norm.", "lm_head.", "embed_tokens.", "input_norm.")) else f"midlayer.{name}"


def _write(network: Eagle3, files: _Files, folder: Path) -> None:
    """Write all weights. Raises ModelLoadError for a tensor that is missing, misshapen or unknown."""
    pieces = _pieces(network)
    norms = {f"{name}.weight": norm for name, norm in network.named_children() if isinstance(norm, RMSNorm)}
    known = pieces.keys() | norms.keys()
    if missing := sorted(known - files.keys()):
        raise ModelLoadError(f"{folder} lacks {missing[0]!r} ({len(missing)} tensors in all); download it again")
    if unknown := sorted(files.keys() - known - {"d2t", "t2d"}):
        raise ModelLoadError(f"{folder} has {unknown[0]!r}, which EAGLE-3 has not ({len(unknown)} in all)")
    for name in sorted(known):
        stored, file = files[name]
        tensor: Tensor = file.get_tensor(stored)
        if name in norms:
            expected = list(norms[name].weight.shape)
        else:
            expected = [pieces[name][0].rows, sum(piece.columns for piece in pieces[name])]
        if list(tensor.shape) != expected:
            raise ModelLoadError(
                f"{folder}: {stored} has shape {list(tensor.shape)}, and this model needs {expected}; use a draft that"
                " was trained for it"
            )
        if name in norms:
            norms[name].weight.data.copy_(tensor)
        for piece in pieces.get(name, ()):
            part = tensor[:, piece.column : piece.column + piece.columns].contiguous()
            piece.layer.format.write(piece.layer.weight, piece.row, part, mapped=False)
    for layer in network.modules():
        if isinstance(layer, Matrix):
            layer.finish()


def _target_ids(files: _Files, config: Eagle3Config, folder: Path) -> npt.NDArray[np.int32] | None:
    """Value of :attr:`Eagle3.target_ids`: for each row of the draft's output head, the token id in the served model's
    vocabulary. None if row i stands for token id i. Raises ModelLoadError."""
    if "d2t" not in files:
        if config.draft_vocab_size != config.layer.vocab_size:
            raise ModelLoadError(f"{folder} lacks 'd2t', the token ids of its {config.draft_vocab_size} rows")
        return None
    stored, file = files["d2t"]
    offsets = file.get_tensor(stored)
    if list(offsets.shape) != [config.draft_vocab_size] or offsets.is_floating_point():
        raise ModelLoadError(f"{folder}: d2t must hold {config.draft_vocab_size} whole numbers; download it again")
    ids = offsets.to(torch.int64).numpy() + np.arange(config.draft_vocab_size)
    if len(ids) and (ids.min() < 0 or ids.max() >= config.layer.vocab_size or (np.diff(ids) <= 0).any()):
        raise ModelLoadError(
            f"{folder}: d2t must give ascending token ids below {config.layer.vocab_size}; use a draft for this model"
        )
    found: npt.NDArray[np.int32] = ids.astype(np.int32)
    return found
