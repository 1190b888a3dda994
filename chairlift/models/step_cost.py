"""Minimum cost of a step: the bytes of weights, K and V that it reads, and its arithmetic operations."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import torch

from chairlift.kernels.roof import Roof
from chairlift.kernels.weights import PLAIN, QUANTIZED, MatrixShape, WeightFormat
from chairlift.models.context import LayerCache
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.mixers import make_mixer
from chairlift.models.mixers import MixerConfig

__all__ = ["ExpertCost", "ModelCost"]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertCost:
    """Memory and arithmetic that the experts of some layers of equal shape need in a step."""

    layers: int
    in_tail: bool
    """Whether only the tokens at sample positions pass through these experts (true for the last layer)."""
    count: int
    top_k: int
    params: int
    """Number of weights that one expert has."""
    nbytes: int
    """Bytes that the weights of one expert take."""

    def distinct(self, tokens: int) -> float:
        """Expected number of distinct experts in a layer that this many tokens choose, if all are equally likely."""
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)

    def read(self, tokens: int) -> float:
        """Expected bytes of expert weights that a step of ``tokens`` tokens reads: the weights of the distinct
        experts."""
        return self.layers * self.distinct(tokens) * self.nbytes

    def operations(self, tokens: int) -> int:
        """Number of additions and multiplications that the experts need for ``tokens`` tokens."""
        return 2 * self.layers * tokens * self.top_k * self.params


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCost:
    """Memory reads and arithmetic of a model's step, as a function of the number of tokens in the step and of the
    cached tokens that they attend to."""

    body_params: int
    """Number of weights that every token passes through. The embedding is not counted, because it is only looked up."""
    head_params: int
    """Number of weights that only sampled tokens pass through: all that follow the keys and values of the last
    layer."""
    itemsize: int
    """Bytes of one weight, and of one element of K and V, before the savings of a quantised format."""
    kv_bytes: tuple[tuple[int | None, int], ...]
    """(window, bytes per token) for each window size: the K and V of all layers with that window. None means full
    attention."""
    body_saved: int = 0
    """Bytes that a quantised format saves in the weights that every token passes through."""
    head_saved: int = 0
    """Bytes that a quantised format saves in the weights that only sampled tokens pass through."""
    experts: tuple[ExpertCost, ...] = ()
    """Cost of the experts: in all layers but the last, and in the last layer. It is not included in the fields
    above."""

    @classmethod
    def of(
        cls,
        network: NetworkConfig,
        dtype: torch.dtype,
        quantization: str | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> ModelCost:
        """Cost of a network in ``dtype``. ``quantization`` is the format of quantised weights, if any; ``kv_dtype`` is
        the dtype of K and V, if it differs from ``dtype``."""
        hidden = network.hidden_size
        layers = range(network.num_hidden_layers)
        norm = 2 * hidden if network.norm == "layer" else hidden
        norms = {"parallel": 1, "both": 4, "chain": 0}.get(network.block, 2)
        final_norm = norm if network.block != "chain" else 0
        head_params = (hidden + network.head_bias) * network.vocab_size
        mixing = [_mixing(network, number) for number in layers]
        blocks = [_mlp_params(network, number) for number in layers]
        own = [max(norms - _num_missing(network, number), 0) * norm for number in layers]
        whole = sum(each.params for each in mixing) + sum(blocks) + sum(own)
        tail = mixing[-1].tail_params + blocks[-1] + own[-1]
        tail += norm if network.block == "post" else 0  # the final norm in place of that before attention, if any
        saved = tail_saved = head_saved = 0
        # If a checkpoint mixes formats, the first name is the format of most weights.
        small = PLAIN if quantization is None else QUANTIZED[quantization.partition("+")[0]]
        if quantization is not None:
            behind = _saved(mixing[-1].tail_shapes, small, dtype)
            products = [shape for each in mixing for shape in (*each.shapes, *each.tail_shapes)]
            each = [_saved(_mlp_shapes(network, number), small, dtype) for number in layers]
            head = MatrixShape(network.vocab_size, hidden)
            head_saved = PLAIN.nbytes(head, dtype) - small.head.nbytes(head, dtype)
            saved = _saved(products, small, dtype) + sum(each)
            tail_saved = behind + each[-1]
        attending = [window for number, window in enumerate(network.layer_windows) if network.attends_in(number)]
        cached = LayerCache(network.num_key_value_heads, network.head_dim, None).token_bytes(kv_dtype or dtype)
        read = [(window, cached * count) for window, count in collections.Counter(attending).items()]
        if states := sum(_state_bytes(network, number, dtype) for number in layers):
            read.append((1, 2 * states))  # read and written, however long the text is
        return cls(
            body_params=whole + final_norm - tail,
            head_params=head_params + tail,
            itemsize=dtype.itemsize,
            kv_bytes=tuple(read),
            body_saved=saved - tail_saved,
            head_saved=tail_saved + head_saved,
            experts=_expert_costs(network, small, dtype),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. A large step with sampling reads all of them."""
        dense = (self.body_params + self.head_params) * self.itemsize - self.body_saved - self.head_saved
        return dense + sum(part.layers * part.count * part.nbytes for part in self.experts)

    def least_seconds(self, roof: Roof, tokens: int, sampled: int, kv_bytes: float) -> float:
        """Minimum duration in seconds of a step with ``tokens`` tokens, of which ``sampled`` are sampled from.

        The step reads ``kv_bytes`` of K and V. Attention within prompts, activations and sampling are not counted.
        """
        weights = self.body_params + (self.head_params if sampled else 0)
        saved = self.body_saved + (self.head_saved if sampled else 0)
        operations = 2 * (tokens * self.body_params + sampled * self.head_params)
        passing = [(part, sampled if part.in_tail else tokens) for part in self.experts]
        operations += sum(part.operations(count) for part, count in passing)
        read = int(sum(part.read(count) for part, count in passing))
        return roof.seconds(weights * self.itemsize - saved + read, operations) + kv_bytes / roof.bandwidth

    def kv_read(self, context: int) -> int:
        """Bytes of K and V that one token reads if it is the last of ``context`` tokens."""
        return sum(min(context, window or context) * nbytes for window, nbytes in self.kv_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mixing:
    """Weights of one layer's attention, recurrent mixer, or both, as they count in the cost of a step."""

    params: int
    tail_params: int
    """Number of weights after the keys and values, or after the state. Only tokens that are sampled from pass through
    them."""
    shapes: list[MatrixShape]
    """Shapes of the linear layers before the keys and values, which a quantised format can make smaller."""
    tail_shapes: list[MatrixShape]


def _num_missing(network: NetworkConfig, layer: int) -> int:
    """Number of halves of the layer (first: attention or mixer; second: MLP) that it lacks. Each half that is present
    has a norm."""
    mixes = network.attends_in(layer) or network.mixer(layer) is not None
    return (not network.has_mlp(layer)) + (not mixes)


def _mixing(network: NetworkConfig, layer: int) -> _Mixing:
    parts = [_attention(network)] if network.attends_in(layer) else []
    mixer = network.mixer(layer)
    if mixer is not None:
        parts.append(_recurrence(network, mixer))
    params, tail = (sum(getattr(each, name) for each in parts) for name in ("params", "tail_params"))
    return _Mixing(params, tail, [s for each in parts for s in each.shapes], [s for e in parts for s in e.tail_shapes])


def _recurrence(network: NetworkConfig, mixer: MixerConfig) -> _Mixing:
    hidden = network.hidden_size
    before, behind = mixer.products(hidden)
    plain, tail_plain = mixer.num_plain(hidden)
    tail = tail_plain + sum(out * k for out, k in behind)
    shapes = [[MatrixShape(*each) for each in products] for products in (before, behind)]
    return _Mixing(plain + sum(out * k for out, k in before) + tail, tail, *shapes)


def _attention(network: NetworkConfig) -> _Mixing:
    hidden = network.hidden_size
    q_width = network.num_attention_heads * network.head_dim
    kv_width = network.num_key_value_heads * network.head_dim
    q_norm, k_norm = {None: (0, 0), "all": (q_width, kv_width)}.get(network.qk_norm, (network.head_dim,) * 2)
    gates = q_width if network.output_gate else 0
    params = hidden * (gates + q_width + 2 * kv_width) + q_width * hidden
    params += (gates + q_width + 2 * kv_width) * network.qkv_bias + hidden * network.o_bias + q_norm + k_norm
    keys = [MatrixShape(2 * kv_width, hidden)]
    queries = [MatrixShape(gates + q_width, hidden), MatrixShape(hidden, q_width)]
    return _Mixing(params, params - 2 * kv_width * (hidden + network.qkv_bias) - k_norm, keys, queries)


def _state_bytes(network: NetworkConfig, layer: int, dtype: torch.dtype) -> int:
    """Bytes of one request's recurrent state in this layer; 0 if the layer has none."""
    with torch.device("meta"):
        mixer = make_mixer(network, layer)
    return 0 if mixer is None else sum(mixer.state.part_bytes(dtype))


def _mlp_params(network: NetworkConfig, layer: int) -> int:
    """Number of weights after attention that every token passes through: those of the MLP, or of the router and the
    shared expert. Norms are not counted."""
    if not network.has_mlp(layer):
        return 0
    hidden = network.hidden_size
    inner = network.intermediate_size
    products = 3 if network.gated else 2
    if (found := network.experts) is None or not network.has_experts(layer):
        return products * hidden * inner + ((products - 1) * inner + hidden) * network.mlp_bias
    router = (hidden + found.correction) * found.routing.num_experts + hidden * found.shared_gate
    latent = 2 * hidden * found.latent_size + (found.latent_size + hidden) * (found.latent_size > 0) * network.mlp_bias
    shared = products * hidden * found.shared_size
    if found.shared_size:
        shared += ((products - 1) * found.shared_size + hidden) * network.mlp_bias
    return router + latent + shared


def _mlp_shapes(network: NetworkConfig, layer: int) -> list[MatrixShape]:
    """Shapes of the linear layers that :func:`_mlp_params` counts, which a quantised format can make smaller."""
    if not network.has_mlp(layer):
        return []
    hidden = network.hidden_size
    inner = network.intermediate_size
    products = 3 if network.gated else 2
    if network.experts is not None and network.has_experts(layer):
        inner = network.experts.shared_size
    shapes = [MatrixShape((products - 1) * inner, hidden), MatrixShape(hidden, inner)] if inner else []
    latent = 0 if network.experts is None or not network.has_experts(layer) else network.experts.latent_size
    return [*shapes, MatrixShape(latent, hidden), MatrixShape(hidden, latent)] if latent else shapes


def _saved(shapes: Iterable[MatrixShape], small: WeightFormat, dtype: torch.dtype) -> int:
    return sum(PLAIN.nbytes(shape, dtype) - small.nbytes(shape, dtype) for shape in shapes)


def _expert_costs(network: NetworkConfig, small: WeightFormat, dtype: torch.dtype) -> tuple[ExpertCost, ...]:
    found = network.experts
    if found is None:
        return ()
    width = found.latent_size or network.hidden_size
    inner = found.intermediate_size
    count = found.routing.num_experts
    first = 1 + network.gated  # matrices before the activation
    shapes = [MatrixShape(count * first * inner, width, stack=count), MatrixShape(count * width, inner, stack=count)]
    nbytes = sum(small.stacked.nbytes(shape, dtype) for shape in shapes) // count
    parts = ((False, sum(found.layers[:-1])), (True, int(found.layers[-1])))
    return tuple(
        ExpertCost(layers, in_tail, count, found.routing.top_k, (first + 1) * width * inner, nbytes)
        for in_tail, layers in parts
        if layers
    )
