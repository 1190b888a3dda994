"""The decoder-only language model. Every supported family is an instance of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.weights import PLAIN, WeightFormat
from chairlift.models.context import AttentionContext, LayerCache, LayerState
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.decoder import DecoderLayer
from chairlift.models.layers.linear import Linear, Matrix, Stack, TokenEmbedding
from chairlift.models.layers.norm import make_norm
from chairlift.models.layers.rotary import RotaryEmbedding

__all__ = ["CausalLM", "Decoder", "lay_out_layers", "lay_out_rest", "quantization_of", "weight_bytes_of"]


class Decoder(nn.Module):
    """The decoder without its output head. It is a module of its own so that its parameters have Hugging Face's
    ``model.`` prefix."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        outer = config.embedding_width
        self.embed_tokens = TokenEmbedding(config.vocab_size, outer or config.hidden_size)
        self.project_in = Linear(outer, config.hidden_size) if outer else None
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.block not in ("post_sum", "chain") else None
        self.project_out = Linear(config.hidden_size, outer) if outer else None
        context = config.max_position_embeddings
        layer_ropes = [None if config.rotates_apart else rope for rope in config.layer_ropes]
        ropes = list(dict.fromkeys(rope for rope in layer_ropes if rope is not None))
        self.rotary = nn.ModuleList(RotaryEmbedding(config.head_dim, rope, context) for rope in ropes)
        self.layer_tables = [None if rope is None else ropes.index(rope) for rope in layer_ropes]
        self.first_row = config.first_position_row
        rows = context + self.first_row
        self.embed_positions = TokenEmbedding(rows, config.hidden_size) if config.learned_positions else None
        self.embedding_scale = config.embedding_scale
        self.logit_scale = config.logit_scale
        self.rounds_scale = config.rounds_embedding_scale

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Input of the first layer: the embeddings of the tokens, [T, D]."""
        hidden: Tensor = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.embed_positions is not None:
            hidden = hidden + ops.embedding(positions, self.embed_positions.weight[self.first_row :])
        if self.embedding_scale != 1.0:
            factor = self.embedding_scale
            hidden = ops.scale(hidden, float(torch.tensor(factor).to(hidden.dtype)) if self.rounds_scale else factor)
        return hidden

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> list[ops.Rotary | None]:
        """Per layer of the decoder, the cosines and sines that rotate q and k; None for a layer that does not rotate
        them."""
        tables = [rotary(positions, dtype) for rotary in self.rotary]
        return [None if table is None else tables[table] for table in self.layer_tables]

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        hidden = self.embed(token_ids, positions)
        rotations = self.rotations(positions, hidden.dtype)
        for layer, rotary in zip(self.layers, rotations, strict=True):
            hidden = layer(hidden, rotary, positions, ctx)
        return self.close(hidden)

    def close(self, hidden: Tensor) -> Tensor:
        """Result of the decoder: what comes after the last layer, whose result is ``hidden`` [T, D]."""
        out: Tensor = hidden if self.norm is None else self.norm(hidden)
        out = out if self.project_out is None else self.project_out(out)
        # The logit scale is applied to the hidden states. The output head then remains a single matmul, which the
        # kernels fuse with sampling.
        return out if self.logit_scale == 1.0 else ops.scale(out, self.logit_scale)


class CausalLM(nn.Module):
    """``model(token_ids[T], positions[T], ctx) -> hidden[T, D]`` and ``compute_logits(hidden[R, D]) -> [R, V]``.

    ``token_ids`` and ``positions`` are int64; hidden states and logits have the model's dtype. New models start from
    normal weights of standard deviation 0.02 drawn from torch's global generator, with gradients enabled.
    """

    rounds_floats = False
    """Whether numbers of the checkpoint were rounded to the model's dtype when they were loaded."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.embedding_width or config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output head share the embedding's weight, if the config asks for a tied head and the head's format
        allows sharing."""
        if self.config.tie_word_embeddings and self.lm_head.format.embeds:
            self.lm_head.take(self.model.embed_tokens.format, self.model.embed_tokens.weight)
            self.lm_head.shape = self.model.embed_tokens.shape

    def lay_out(
        self,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        kinds: Mapping[str, GroupKind] | None = None,
    ) -> None:
        """Allocate the parameters of a model on the meta device. The weights are written later.

        Linear layers get the format ``weight_format``, the output head gets ``weight_format.head``, and experts get
        ``weight_format.stacked``. A tied head shares the embedding's weight if the format allows sharing. All other
        parameters are plain and have ``dtype``, unless their module lists them in ``float32_parameters``. ``kinds``
        maps parameter name -> kind of integer groups; it lists the parameters that will be written as integers in
        groups.
        """
        head = self.lm_head
        embedding = self.model.embed_tokens
        for name, layer in self.named_modules():
            if isinstance(layer, Matrix):
                layer.shape = layer.shape._replace(kind=(kinds or {}).get(f"{name}.weight"))
        formats: dict[Matrix, WeightFormat] = {one: weight_format for one in self.modules() if isinstance(one, Linear)}
        formats |= {one: weight_format.stacked for one in self.modules() if isinstance(one, Stack)}
        formats |= {embedding: PLAIN, head: weight_format.head}
        if self.config.tie_word_embeddings and weight_format.head.embeds:
            formats[embedding] = formats.pop(head)
        lay_out_layers(formats, dtype, device)
        self.tie_weights()
        lay_out_rest(self, dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states that the model computes."""
        ends = ("norm.weight", "mixer.recurrent")  # the latter in models without norms; both are never packed
        return next(value.dtype for name, value in self.named_parameters() if name.endswith(ends))

    @property
    def quantization(self) -> str | None:
        """Names of the formats of the quantised weights, joined by ``+``; None if no weight is quantised."""
        return quantization_of(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in their current formats. A tied head is counted once."""
        return weight_bytes_of(self, self.dtype)

    def finish_head(self) -> None:
        """Give a tied head a packed copy of the embedding, if the head's format cannot share the embedding's weight.
        Call this method after the embedding has been written."""
        if self.config.tie_word_embeddings and not self.lm_head.format.embeds:
            rows = self.model.embed_tokens.weight.detach()
            self.lm_head.format.write(self.lm_head.weight, 0, rows, mapped=False)
            self.lm_head.finish()

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, [R, V], computed from hidden states ``hidden`` [R, D]."""
        logits: Tensor = self.lm_head(hidden)
        return logits if self.config.logit_cap is None else ops.soft_cap(logits, self.config.logit_cap)

    def kv_cache_spec(self) -> list[LayerCache | LayerState]:
        """Shapes of the caches, in layer order: a LayerCache for a layer with attention, a LayerState for a recurrent
        layer. A layer with both has first a LayerCache, then a LayerState. If several processes share the model, these
        are the caches of this process."""
        size = self.config.head_dim
        kept: list[LayerCache | LayerState] = []
        layers: list[Any] = list(self.model.layers)
        for layer, window in zip(layers, self.config.layer_windows, strict=True):
            if layer.self_attn is not None:
                kept.append(LayerCache(layer.self_attn.stored_kv_heads, size, window))
            if layer.mixer is not None:
                kept.append(layer.mixer.state)
        return kept


def lay_out_layers(formats: Mapping[Matrix, WeightFormat], dtype: torch.dtype, device: torch.device) -> None:
    """Allocate on ``device`` the weights of layers that are on the meta device. ``formats`` maps layer -> format of the
    layer's weight."""
    for each in dict.fromkeys(formats.values()):
        layers = [layer for layer, used in formats.items() if used == each]
        weights = each.empty([layer.shape for layer in layers], dtype, device)
        for layer, weight in zip(layers, weights, strict=True):
            layer.take(each, weight)


def lay_out_rest(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate on ``device``, as plain tensors, all parameters that are still on the meta device."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            if value.is_meta:
                kept = torch.float32 if name in getattr(module, "float32_parameters", ()) else dtype
                empty = torch.empty(value.shape, dtype=kept, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))


def quantization_of(model: nn.Module) -> str | None:
    """Names of the formats of the quantised weights, joined by ``+``; None if no weight is quantised."""
    layers = [layer for layer in model.modules() if isinstance(layer, Matrix)]
    names = {layer.format.name(layer.weight) for layer in layers} - {None}
    return "+".join(sorted(str(name) for name in names)) or None


def weight_bytes_of(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of all weights of a model of ``dtype`` in their current formats. A shared weight is counted once."""
    layers = {id(layer.weight): layer for layer in model.modules() if isinstance(layer, Matrix)}
    plain = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in layers)
    return plain + sum(layer.format.nbytes(layer.shape, dtype) for layer in layers.values())
