"""Attention inside sequences equals its definition, and patched models give packed rows what they give each alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.kernels import reference, sdpa
from chairlift.models.context import PackedContext
from chairlift_train import varlen
from chairlift_train.layout import Layout
from chairlift_train.varlen import VarlenContext, attend, patch_hf
from tests.train.families import EXACT, VOCABULARY, tiny

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
LENGTHS = (9, 1, 13, 13, 6)


def random_inputs(layout: Layout, heads: tuple[int, int], dtype: torch.dtype, head_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.num_tokens)
    shapes = [(layout.num_tokens, count, head_dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [q.requires_grad_(True), k.requires_grad_(True), v.requires_grad_(True), weight]


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v, weight = inputs
    return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, *, scale: float | None = None, window: int | None
) -> torch.Tensor:
    """The definition: every pair of tokens is scored, and a mask [T, T] hides those that must not meet."""
    segments, row = torch.from_numpy(layout.segment_ids).to(q.device), torch.arange(layout.num_tokens, device=q.device)
    behind = row[:, None] - row[None, :]
    mask = (segments[:, None] == segments[None, :]) & (behind >= 0) & (behind < (window or layout.num_tokens))
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.transpose(0, 1) for x in (q, *(y.repeat_interleave(group, 1) for y in (k, v))))
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 7, 16, 33, 70]), min_size=1, max_size=9),
    heads=st.sampled_from([(4, 2), (4, 4), (6, 1)]),
    window=st.sampled_from([None, 1, 4, 16, 100]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_attention_and_its_gradients_equal_the_definition(
    lengths: list[int], heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    layout = Layout.of(lengths)
    inputs = random_inputs(layout, heads, dtype)
    ours = with_gradients(attend(*inputs[:3], layout, window=window), inputs)
    wide = [x.detach().to(torch.float64).requires_grad_(True) for x in inputs]
    truth = with_gradients(attend_dense(*wide[:3], layout, window=window), wide)
    bound = TOLERANCE[dtype] * (10 if dtype is torch.bfloat16 else 1)
    for mine, exact in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=bound)


def test_short_segments_of_similar_length_share_a_call_and_long_ones_are_not_copied() -> None:
    def calls(lengths: list[int], window: int | None = None) -> tuple[list[tuple[int, int]], bool]:
        plan = sdpa._plan(Layout.of(lengths).cu_seqlens, window, torch.device("cpu"))
        return plan.calls, plan.order is not None

    assert calls([128] * 16) == ([(16, 128)], False)
    assert calls([2000]) == ([(1, 2000)], False)
    assert calls([300, 500, 500, 20]) == ([(1, 300), (2, 500), (1, 20)], False)
    assert calls([9, 70, 16, 70, 10]) == ([(3, 16), (2, 70)], True)
    assert calls([9, 9, 30, 9], window=12) == ([(3, 9), (1, 30)], True)
    assert calls([30, 30, 9], window=12) == ([(1, 30), (1, 30), (1, 9)], False)


def test_plans_cached_by_an_evaluation_can_be_trained_with() -> None:
    layout = Layout.of([3, 9] * 16)
    inputs = random_inputs(layout, (4, 2), torch.float32)
    sdpa._plan.cache_clear()
    with torch.inference_mode():
        out = attend(*inputs[:3], layout)
        offsets = varlen._device_offsets((0, 7, 10), torch.device("cpu"))
    assert torch.equal(with_gradients(attend(*inputs[:3], layout), inputs)[0], out)
    assert not offsets.is_inference()


@pytest.mark.parametrize("window", [None, 3])
def test_the_definition_is_that_of_the_kernels(window: int | None) -> None:
    layout = Layout.of(LENGTHS)
    q, k, v, _ = (x.detach() for x in random_inputs(layout, (4, 2), torch.float32))
    dense = attend_dense(q, k, v, layout, scale=0.4, window=window)
    truth = reference.packed_attention(q, k, v, layout.cu_seqlens, scale=0.4, window=window)
    torch.testing.assert_close(dense, truth, rtol=0, atol=1e-5)


def test_values_may_be_narrower_than_keys() -> None:
    layout = Layout.of([5, 5, 3])
    q, k, v, _ = (x.detach() for x in random_inputs(layout, (4, 2), torch.float64))
    for window in (None, 2):
        ours = attend(q, k, v[..., :6], layout, window=window)
        torch.testing.assert_close(ours, attend(q, k, v, layout, window=window)[..., :6], rtol=0, atol=1e-12)


def test_changing_one_sequence_leaves_the_others_bit_for_bit_unchanged() -> None:
    layout = Layout.of(LENGTHS)
    q, k, v, _ = (x.detach() for x in random_inputs(layout, (4, 2), torch.float32))
    before = layout.unpack(attend(q, k, v, layout))
    for victim, (start, end) in enumerate(zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False)):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[start:end] += 1
        after = layout.unpack(attend(*changed, layout))
        assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [i != victim for i in range(5)]


@pytest.mark.parametrize(("lengths", "window"), [([40, 40], None), ([65], None), ([65], 30)])
def test_dropout_drops_attention_weights_and_keeps_the_mean(lengths: list[int], window: int | None) -> None:
    layout = Layout.of(lengths)
    q, k, v, _ = (x.detach() for x in random_inputs(layout, (2, 2), torch.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = torch.stack([attend(q, k, v, layout, dropout=0.5, window=window) for _ in range(300)])
    assert float(draws.std(0)[5:].min()) > 0.01
    assert float((draws.mean(0) - attend(q, k, v, layout, window=window)).abs().mean()) < 0.06


def test_our_context_skips_empty_sequences_and_takes_windows() -> None:
    cu_seqlens = [0, 1, 17, 17, 20, 52, 69, 101]  # lengths 1, 16, 0, 3, 32, 17, 32
    inputs = random_inputs(Layout.of([101]), (4, 2), torch.float32)
    for window in (None, 5):
        results = [
            with_gradients(ctx.attend(0, *inputs[:3], scale=0.3, window=window), inputs)
            for ctx in (VarlenContext(cu_seqlens), PackedContext(cu_seqlens))
        ]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        (((1, 6, 2, 4), (1, 6, 2, 4), (1, 6, 2, 4)), {}, "got [1, 6, 2, 4]"),
        (((6, 3, 4), (6, 2, 4), (6, 2, 4)), {}, "a multiple of Hkv"),
        (((6, 2, 4), (6, 2, 4), (6, 1, 4)), {}, "a multiple of Hkv"),
        (((7, 2, 4), (7, 2, 4), (7, 2, 4)), {}, "the layout is for 6 tokens, q has 7"),
        (((6, 2, 4), (6, 2, 4), (6, 2, 4)), {"window": 0}, "window must be at least 1"),
        (((6, 2, 4), (6, 2, 4), (6, 2, 4)), {"backend": "fast"}, "got 'fast'"),
        (((6, 2, 4), (6, 2, 4), (6, 2, 4)), {"backend": "torch"}, "runs on CUDA tensors"),
        (((6, 2, 4), (6, 2, 4), (6, 2, 4)), {"backend": "flash"}, "runs on CUDA tensors"),
    ],
)
def test_attend_refuses_what_does_not_fit(
    shapes: tuple[tuple[int, ...], ...], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        attend(*(torch.zeros(shape) for shape in shapes), Layout.of([2, 4]), **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_gpu_kernel_equals_the_definition(heads: tuple[int, int], window: int | None) -> None:
    layout = Layout.of(LENGTHS)
    inputs = [x.detach().cuda() for x in random_inputs(layout, heads, torch.bfloat16, head_dim=64)]
    inputs = [x.requires_grad_(i < 3) for i, x in enumerate(inputs)]
    ours = with_gradients(attend(*inputs[:3], layout, window=window, backend="torch"), inputs)
    wide = [x.detach().float().requires_grad_(True) for x in inputs]
    truth = with_gradients(attend_dense(*wide[:3], layout, window=window), wide)
    for mine, exact in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.float(), exact, rtol=5e-2, atol=5e-2)


# -- transformers ------------------------------------------------------------------------------------------------------


def packed_row() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Sequences, and the row that holds them all."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    positions = torch.from_numpy(Layout.of(LENGTHS).positions)
    return sequences, {"input_ids": torch.cat(sequences)[None], "position_ids": positions[None]}


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum over the targets of one sequence: logits [L, V], ids [L]."""
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def gradients(model: Any) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", [*EXACT, "opt"])
def test_a_patched_model_gives_a_packed_row_what_it_gives_each_sequence_alone(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype)
    sequences, row = packed_row()
    alone = []
    for ids in sequences:
        logits = model(input_ids=ids[None]).logits[0]
        loss_of(logits, ids).backward()  # type: ignore[no-untyped-call]
        alone.append(logits.detach())
    truth = gradients(model)
    with patch_hf(model):
        packed = Layout.of(LENGTHS).unpack(model(**row).logits)
        torch.stack([loss_of(x, ids) for x, ids in zip(packed, sequences, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
    for ours, theirs in zip(packed, alone, strict=True):
        assert float((ours - theirs).detach().abs().max()) <= TOLERANCE[dtype] * float(theirs.abs().max())
    scale = max(float(x.abs().max()) for x in truth)
    for ours, theirs in zip(gradients(model), truth, strict=True):
        # Gemma computes with float32 copies of its norms' weights, whatever their dtype.
        bound = TOLERANCE[torch.float32 if family == "gemma3" and theirs.ndim == 1 else dtype]
        assert float((ours - theirs).abs().max()) <= bound * scale


def test_removing_the_patch_puts_everything_back_bit_for_bit() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = tiny("gemma3")
    _, row = packed_row()
    registered = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    chosen = model.config._attn_implementation
    before = model(**row).logits
    patch = patch_hf(model)
    assert model.config._attn_implementation != chosen
    patch.remove()
    patch.remove()
    assert torch.equal(model(**row).logits, before)
    assert model.config._attn_implementation == chosen
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == registered
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_unpacked_inputs_run_as_before() -> None:
    model = tiny("mistral", attention="sdpa")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        {"input_ids": ids[:1], "attention_mask": mask[1:2]},
        {
            "input_ids": ids[:1],
            "attention_mask": mask[1:2],
            "position_ids": (mask[1:2].cumsum(1) - 1).clamp(min=0),
            "use_cache": False,
        },
        {"input_ids": ids, "position_ids": torch.arange(12)[None]},
        {"input_ids": ids, "position_ids": torch.arange(12).expand(3, -1)},
    ]
    before = [model(**call).logits for call in calls]
    generated = model.generate(ids[:1], max_new_tokens=6, do_sample=False, use_cache=True)
    with patch_hf(model):
        assert all(torch.equal(model(**call).logits, x) for call, x in zip(calls, before, strict=True))
        assert torch.equal(model.generate(ids[:1], max_new_tokens=6, do_sample=False, use_cache=True), generated)


def test_a_copy_of_a_patched_model_is_patched_too() -> None:
    model = tiny("llama")
    ids = torch.arange(1, 13)[None]
    row = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]), "use_cache": False}
    with patch_hf(model):
        expected = model(**row).logits
        copied = copy.deepcopy(model)
        assert torch.equal(copied(**row).logits, expected)
    assert torch.equal(copied(**row).logits, expected)
    assert not torch.equal(copied(input_ids=ids).logits, expected)


def test_a_cache_does_not_make_a_patched_model_forget_the_boundaries() -> None:
    model = tiny("llama")
    _, row = packed_row()
    with patch_hf(model):
        assert torch.equal(model(**row, use_cache=True).logits, model(**row, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_sees_the_layout_of_its_own_forward_pass(family: str, reentrant: bool) -> None:
    model = tiny(family)
    _, row = packed_row()
    other = {"input_ids": row["input_ids"], "position_ids": torch.arange(row["input_ids"].shape[1])[None]}
    results = []
    for checkpointed in (False, True):
        model.train()
        if checkpointed:
            # The first name is of transformers today, the second of those before.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        with patch_hf(model):
            packed, whole = model(**row).logits, model(**other).logits  # the backward pass begins after both
            (packed.logsumexp(-1).sum() + whole.logsumexp(-1).sum()).backward()
        results.append(gradients(model))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_offsets_may_come_with_the_call() -> None:
    model = tiny("llama")
    _, row = packed_row()
    offsets = torch.tensor(Layout.of(LENGTHS).cu_seqlens, dtype=torch.int32)
    with patch_hf(model):
        expected = model(**row).logits
        assert torch.equal(model(**row, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).logits, expected)
        for wrong in (torch.tensor([0, 20, 42]), torch.tensor([0, 42])):
            with pytest.raises(ConfigError, match="disagree"):
                model(**row, cu_seq_lens_q=wrong)
        with pytest.raises(ConfigError, match="without position_ids"):
            model(input_ids=row["input_ids"], cu_seq_lens_q=offsets)
        assert torch.equal(model(**row).logits, expected)


def test_calls_that_would_leak_are_refused() -> None:
    model = tiny("llama")
    _, row = packed_row()
    ids, positions = row["input_ids"], row["position_ids"]
    with patch_hf(model):
        with pytest.raises(ConfigError, match="ignores their boundaries"):
            model(**row, attention_mask=torch.ones_like(ids))
        with pytest.raises(ConfigError, match="ignores their boundaries"):
            model(ids, torch.ones_like(ids), positions)
        with pytest.raises(ConfigError, match="join packed rows"):
            model(input_ids=ids.expand(2, -1), position_ids=positions.expand(2, -1))
        with pytest.raises(ConfigError, match="without restarting at 0"):
            model(input_ids=ids, position_ids=positions + 2)
        with pytest.raises(ConfigError, match="M-RoPE"):
            model(input_ids=ids, position_ids=positions.expand(3, 1, -1))
        with pytest.raises(ConfigError, match="call the patched model"):
            model.model(**row)
        with pytest.raises(ConfigError, match="patched already"):
            patch_hf(model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bloom", "has no AttentionInterface"),
        ("mpt", "has no AttentionInterface"),
        ("qwen3_next", "layer 0 of Qwen3NextForCausalLM is of kind linear_attention"),
        ("mamba", "layer 0 of MambaForCausalLM is of kind (linear_attention|mamba),|MambaForCausalLM has a state"),
        ("mamba2", "layer 0 of Mamba2ForCausalLM is of kind (linear_attention|mamba),|Mamba2ForCausalLM has a state"),
        ("lfm2", "layer 0 of Lfm2ForCausalLM is of kind conv"),
        (
            "recurrent_gemma",
            "layer 0 of RecurrentGemmaForCausalLM|RecurrentGemmaForCausalLM has no AttentionInterface",
        ),
    ],
)
def test_families_that_cannot_be_packed_are_refused(family: str, message: str) -> None:
    model = tiny(family)
    chosen = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        patch_hf(model)
    assert model.config._attn_implementation == chosen


def test_a_model_with_a_state_is_refused_also_where_its_layers_have_no_kinds() -> None:
    model = tiny("llama")
    model._is_stateful = True
    with pytest.raises(ConfigError, match="LlamaForCausalLM has a state that would be carried"):
        patch_hf(model)


def tiny_like(kind: str, **settings: Any) -> Any:
    """A tiny model of an unusual family, or with unusual settings."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "pad_token_id": 0}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.AutoConfig.for_model(kind, **(sizes | heads | settings))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gemma2", {}, r"model\.layers\.0\.self_attn caps its scores"),
        ("gpt_oss", {}, r"model\.layers\.0\.self_attn has attention sinks"),
        ("llama", {"is_causal": False}, "asks for more than a causal mask"),
        ("llama", {"num_hidden_layers": 0}, "no layer of LlamaForCausalLM used its attention interface"),
        # Its layers leave the window to the mask.
        (
            "qwen2_moe",
            {"num_experts": 4, "use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"]},
            r"has a window of \[4\] in its mask",
        ),
    ],
)
def test_attention_that_cannot_be_packed_is_refused_when_the_model_runs(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    model = tiny_like(kind, **settings)
    _, row = packed_row()
    with patch_hf(model), pytest.raises(ConfigError, match=message):
        model(**row)


def test_a_layer_that_looks_ahead_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.is_causal = False
    with patch_hf(model), pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn is not causal"):
        model(**packed_row()[1])


def test_a_layer_called_by_itself_is_refused() -> None:
    model = tiny("llama")
    hidden, positions = torch.zeros(1, 6, 32), torch.arange(6)[None]
    with patch_hf(model), pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn ran outside"):
        model.model.layers[0](hidden, position_embeddings=model.model.rotary_emb(hidden, positions))


def test_patch_refuses_what_is_no_transformers_model() -> None:
    with pytest.raises(ConfigError, match="takes a transformers model"):
        patch_hf(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="backend must be one of"):
        patch_hf(tiny("llama"), backend="fast")  # type: ignore[arg-type]
