"""Runs a transformers model to find the windows of its layers, and checks its results in flat batches.

Neither ``config.json`` nor the arguments of attention reliably give the window of a layer, but the mask of
transformers' own eager attention does. So this module runs one short forward pass and evaluates each layer's mask at
positions far beyond the few tokens of the pass, to see which keys each query may attend to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.sdpa import packed_attention
from chairlift.models.context import LayerCache, PagedContext
from chairlift.models.fallback.model import ATTENTION, AttentionCall, TransformersLM, register_attention, use_attention

__all__ = ["Comparison", "compare_with_eager", "probe_layers"]

_PROBE: Final = "chairlift-probe"
_NUM_PROBED: Final = 5
_MOST_POSITIONS: Final = 1 << 20
"""Number of positions at which an attention mask is tested. No trained model has a longer window."""
_LENGTHS: Final = (17, 9)
"""Number of tokens of each of the two requests whose results are compared with transformers' own attention."""
_STEPS: Final = (((0, 8), (0, 6)), ((8, 15), (6, 7)), ((15, 16), (7, 8)), ((16, 17), (8, 9)))
"""One entry per step of the comparison: the token range (first, end) of each of the two requests in this step's flat
batch. The steps are a chunk and a prompt, a chunk and a decode, then decodes."""
_BLOCK: Final = 4
_FLOORS: Final = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Dtype -> difference of logits, relative to their spread, that is always allowed, because rounding causes it in any
model."""
_AMPLIFIED: Final = 4.0
"""Largest allowed difference of logits, as a multiple of the change that one rounding of the embeddings causes. In
tests, tiny random models of many families differed by 0.3 to 1.2 times this change. A mixture of experts may differ by
more, if rounding changes the choice of experts."""


_MORE: Final = "is more than causal"


class _Probe:
    """Attention function of the probing forward pass: it computes attention within one sequence, and records each
    layer's arguments."""

    def __init__(self, positions: int) -> None:
        self.calls: list[AttentionCall] = []
        self.windows: list[int | None] = []
        self._positions = min(positions, _MOST_POSITIONS)
        self._masks: dict[int, tuple[Tensor, int | str | None]] = {}

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replacement for transformers' mask function. It records the mask, from which the visible keys of each query
        are read."""
        length = kwargs["q_length"]
        device = kwargs.get("device", torch.device("cpu"))
        given = kwargs["attention_mask"]
        window: int | str | None = _MORE
        if not kwargs.get("use_vmap") and (given is None or bool(given.all())):
            window = _window_of(kwargs["mask_function"], self._positions, device)
        mask = torch.ones(1, 1, length, length, dtype=kwargs.get("dtype", torch.float32), device=device)
        self._masks[mask.data_ptr()] = (mask, window)
        return mask

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer != len(self.calls):
            raise ModelLoadError(f"layer {call.layer} attends where layer {len(self.calls)} should")
        mask = call.mask
        if mask is None or mask.data_ptr() not in self._masks or mask.shape[-2:] != (len(call.q),) * 2:
            raise ModelLoadError(f"layer {call.layer} attends with a mask that is not transformers' own")
        window = self._masks[mask.data_ptr()][1]
        if isinstance(window, str):
            raise ModelLoadError(f"the mask of layer {call.layer} {window}")
        if call.window is not None and call.window < self._positions and call.window != window:
            raise ModelLoadError(
                f"layer {call.layer} says that its window is {call.window}, and its mask has"
                f" {'none' if window is None else window}"
            )
        self.calls.append(call)
        self.windows.append(window)
        q = call.q
        k = call.k
        v = call.v
        segment = (0, len(q))
        scale = call.scale
        cap = call.softcap
        return packed_attention(q, k, v, segment, scale=scale, window=window, cap=cap, sinks=call.sinks)


def _window_of(visible: Callable[..., Tensor], positions: int, device: Any) -> int | str | None:
    """Number of newest tokens that the mask function ``visible`` lets each query attend to, the query's own token
    included; None: all earlier tokens. If the mask is not simply causal with an optional sliding window, the result is
    a text that describes it."""
    found = []
    zero = torch.tensor(0, device=device)
    for query in (positions - 1, positions - 2, positions // 2):
        keys = torch.arange(query + 2, device=device)
        try:
            shown = visible(zero, zero, torch.tensor(query, device=device), keys)
        except (IndexError, RuntimeError, TypeError):  # a mask that reads the tokens, or has no function
            return _MORE
        count = int(shown.sum())
        if shown.shape != keys.shape or not count or not bool(shown[query + 1 - count : query + 1].all()):
            return _MORE
        found.append(count)
    window = found[0]
    whole = [positions, positions - 1, positions // 2 + 1]
    if found != [min(window, each) for each in whole]:
        return "shows another number of tokens to each query, as in chunked attention"
    return None if window == positions else window


def probe_layers(hf: Any, network_positions: int) -> list[LayerCache]:
    """Shapes of K and V per token and the window of each layer, for a model with weights.

    Raises ModelLoadError for layers that Chairlift's attention cannot compute: masks of another form, keys of tokens
    outside the step, or attention that does not use transformers' interface.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from chairlift.models.fallback import model as ours

    register_attention()
    probe = _Probe(network_positions)
    AttentionInterface.register(_PROBE, ours._attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    use_attention(hf, _PROBE)
    try:
        ids = torch.arange(_NUM_PROBED, device=hf.device)[None]
        with torch.inference_mode(), ours.attending(probe):
            ours.body_of(hf)(input_ids=ids, position_ids=ids.clone(), use_cache=False)
    finally:
        AttentionMaskInterface._global_mapping.pop(_PROBE, None)
        use_attention(hf, ATTENTION)
    wanted = hf.config.num_hidden_layers
    if len(probe.calls) != wanted:
        raise ModelLoadError(f"{len(probe.calls)} of its {wanted} layers attend through transformers' interface")
    layers = []
    for call, window in zip(probe.calls, probe.windows, strict=True):
        width = call.v.shape[2]
        layers.append(LayerCache(call.k.shape[1], call.k.shape[2], window, None if width == call.k.shape[2] else width))
    return layers


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing a model's logits in flat batches with its logits under transformers' eager attention."""

    difference: float
    """Mean difference of logits, relative to the spread of the logits: the maximum of the first step's mean and the
    later steps' mean."""
    tolerance: float
    """Maximum difference of the logits that rounding can explain."""
    seconds: float


@torch.inference_mode()
def compare_with_eager(model: TransformersLM) -> Comparison:
    """Compare the logits of two short requests: transformers' eager attention against four flat batches with paged KV.

    One request is prefilled in chunks, and decodes run in the same batches as chunks. The comparison costs about as
    much as a prompt of 100 tokens, in six passes, and needs no second copy of the weights. Raises ModelLoadError if
    rounding does not explain the difference.
    """
    start = time.monotonic()
    hf = model.hf
    vocab = model.config.vocab_size
    device = hf.device
    ids = (torch.arange(2 * _LENGTHS[0], device=device) * 7919 + 13).remainder(vocab).view(2, -1)
    use_attention(hf, "eager")
    try:
        expected = _eager(hf, ids)
        shaken = _shaken(hf, ids)
    finally:
        use_attention(hf, ATTENTION)
    found = _paged(model, ids)
    firsts = []
    laters = []
    noises = []
    for row, length in enumerate(_LENGTHS):
        reference = expected[row, :length].float()
        first = _STEPS[0][row][1]
        spread = reference.std(-1).clamp_min(1e-30)
        away, noise = (_distance(each.float() - reference, spread) for each in (found[row], shaken[row, :length]))
        firsts.append(away[:first])
        laters.append(away[first:])
        noises.append(noise)
    # max() returns NaN if one of the values is NaN, so NaN in the logits is noticed.
    difference = float(torch.stack([torch.cat(firsts).mean(), torch.cat(laters).mean()]).max())
    tolerance = max(_FLOORS[model.dtype], _AMPLIFIED * float(torch.cat(noises).mean()))
    if not difference <= tolerance:
        raise ModelLoadError(
            f"the model was compared with transformers' eager attention, and logits differ by {difference:.2g} of their"
            f" spread, where rounding explains {tolerance:.2g}; this model_type cannot be served by"
            f" transformers {_version()}: please report it"
        )
    return Comparison(difference, tolerance, time.monotonic() - start)


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _distance(difference: Tensor, spread: Tensor) -> Tensor:
    """Difference of each token's logits: root mean square over the vocabulary, divided by the spread of the token's
    logits."""
    return difference.square().mean(-1).sqrt() / spread


def _eager(hf: Any, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logits: Tensor = hf(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


def _shaken(hf: Any, ids: Tensor) -> Tensor:
    """Logits of the model after its embeddings were changed by about one rounding step. They show how much rounding can
    change logits."""

    def shake(module: Any, args: Any, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
        return out * (1 + signs * torch.finfo(out.dtype).eps)

    hook = hf.get_input_embeddings().register_forward_hook(shake)
    try:
        return _eager(hf, ids)
    finally:
        hook.remove()


def _paged(model: TransformersLM, ids: Tensor) -> list[Tensor]:
    """Logits of both requests, computed in flat batches whose KV blocks are not contiguous."""
    spec = model.kv_cache_spec()
    device = ids.device
    blocks = -(-_LENGTHS[0] // _BLOCK)
    table = torch.arange(2 * blocks, device=device).view(blocks, 2).t().flip(1)
    caches = []
    for layer in spec:
        shape = (2 * blocks, _BLOCK, layer.num_kv_heads)
        widths = (layer.head_dim, layer.value_dim or layer.head_dim)
        k, v = (torch.full((*shape, width), float("nan"), dtype=model.dtype, device=device) for width in widths)
        caches.append((k, v))
    logits: list[list[Tensor]] = [[], []]
    for step in _STEPS:
        places = [torch.arange(first, end, device=device) for first, end in step]
        slots = [table[row, place // _BLOCK] * _BLOCK + place % _BLOCK for row, place in enumerate(places)]
        counts = [len(place) for place in places]
        ctx = PagedContext(
            cu_seqlens=[0, counts[0], sum(counts)],
            seq_lens=[end for _, end in step],
            block_tables=table[None],
            slot_mapping=torch.cat(slots)[None],
            kv_caches=caches,
            layer_groups=[0] * len(spec),
        )
        tokens = torch.cat([ids[row, place] for row, place in enumerate(places)])
        out = model.compute_logits(model(tokens, torch.cat(places), ctx))
        for row, part in enumerate(torch.split(out, counts)):
            logits[row].append(part)
    return [torch.cat(parts) for parts in logits]
