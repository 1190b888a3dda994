"""``config.json`` of published models, as on the Hub except for smaller sizes and padding token ids.

They contain surplus keys, names of code that is never run, old and new keys of rotary scaling, null for defaults, tied
heads, and layer types.
"""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of
from tests.models.published_experts import PUBLISHED_EXPERTS
from tests.models.published_more import PUBLISHED_MORE
from tests.models.published_recurrent import PUBLISHED_RECURRENT
from tests.models.published_whole import PUBLISHED_WHOLE

__all__ = ["PUBLISHED"]

_FULL, _WINDOW = "full_attention", "sliding_attention"


def _llama(dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "hidden_act": "silu", "pretraining_tp": 1, "rms_norm_eps": 1e-5}
    given = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "rope_scaling": None}
    return config_of("llama", "LlamaForCausalLM", dtype, usual, given, {"tie_word_embeddings": False}, more)


_LLAMA_3 = {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_theta": 500000.0,
}
_LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _mistral(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return config_of("mistral", "MistralForCausalLM", "bfloat16", usual, {"tie_word_embeddings": False}, more)


def _qwen(version: int, **more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    given = {"max_window_layers": 3, "rope_theta": 1000000.0, "use_sliding_window": False}
    return config_of(f"qwen{version}", f"Qwen{version}ForCausalLM", "bfloat16", usual, given, more)


_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 128,
}


def _neox(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
    rotary = {"rotary_emb_base": 10000, "rotary_pct": 0.25, "max_position_embeddings": 2048}
    last = {"tie_word_embeddings": False, "use_parallel_residual": True, "num_key_value_heads": ...}
    return config_of("gpt_neox", "GPTNeoXForCausalLM", "float16", usual, rotary, last, {"attention_dropout": ...}, more)


def _phi(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": None, "eos_token_id": None, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
    sizes = {"num_key_value_heads": None, "max_position_embeddings": 2048, "hidden_size": 128}
    last = {"embd_pdrop": 0.0, "partial_rotary_factor": 0.5, "qk_layernorm": False, "resid_pdrop": 0.0}
    rope = {"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False}
    return config_of("phi", "PhiForCausalLM", "float16", usual, sizes, last, rope, more)


_PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


def _phi3(**more: Any) -> dict[str, Any]:
    usual = {"auto_map": _PHI3_CODE, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 32000}
    more = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, **more}
    last = {"embd_pdrop": 0.0, "hidden_act": "silu", "pad_token_id": 0, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5}
    rope = {"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_key_value_heads": 4}
    return config_of("phi3", "Phi3ForCausalLM", "bfloat16", usual, last, rope, more)


def _long(pairs: int, kind: str) -> dict[str, Any]:
    return {"long_factor": [1.08 * 1.7**i for i in range(pairs)], "short_factor": [1.05] * pairs, "type": kind}


def _gemma(version: str, name: str, **more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "head_dim": 32, "pad_token_id": 0}
    rope = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    return config_of(version, name, "bfloat16", usual, rope, more)


def _gemma2(**more: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"}
    act = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    return _gemma("gemma2", "Gemma2ForCausalLM", **{**caps, **act, "sliding_window": 9, **more})


def _gemma3(**more: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"}
    last = {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_scaling": None, "sliding_window": 9}
    more = {**caps, **last, "rope_theta": 1000000.0, "max_position_embeddings": 32768, **more}
    return _gemma("gemma3_text", "Gemma3ForCausalLM", **more)


def _granite(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "mlp_bias": False}
    factors = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    last = {"logits_scaling": 8.0, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_scaling": None}
    tied = {"tie_word_embeddings": True, "attention_dropout": 0.1, "max_position_embeddings": 4096}
    return config_of("granite", "GraniteForCausalLM", "bfloat16", usual, factors, last, tied, more)


def _olmo(version: int, **more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu", "pad_token_id": 1}
    rope = {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False}
    sizes = {"num_key_value_heads": 4, "max_position_embeddings": 4096}
    return config_of(f"olmo{version}", f"Olmo{version}ForCausalLM", "float32", usual, rope, sizes, more)


_OLMO3 = {"layer_types": [_WINDOW, _WINDOW, _WINDOW, _FULL], "num_hidden_layers": 4, "sliding_window": 9}
_OLMO3_ROPE = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}


def _cohere2(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "head_dim": 16}
    last = {"cache_implementation": "hybrid", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "pad_token_id": 0}
    rope = {"position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0}
    old = {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "sliding_window_pattern": 4}
    flags = dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), True)
    sizes = {"num_hidden_layers": 4, "sliding_window": 9, "max_position_embeddings": 8192}
    return config_of("cohere2", "Cohere2ForCausalLM", "bfloat16", usual, last, rope, old, flags, sizes, more)


def _glm4(**more: Any) -> dict[str, Any]:
    usual = {"eos_token_id": [151329, 151336, 151338], "head_dim": 32, "hidden_act": "silu", "pad_token_id": 3}
    rope = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    return config_of("glm4", "Glm4ForCausalLM", "bfloat16", usual, rope, {"max_position_embeddings": 32768}, more)


def _starcoder2(**more: Any) -> dict[str, Any]:
    usual = {"attention_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh"}
    drop = {"embedding_dropout": 0.1, "residual_dropout": 0.1, "norm_epsilon": 1e-5, "use_bias": True}
    rope = {"max_position_embeddings": 16384, "rope_theta": 999999.4420358813, "sliding_window": 9}
    return config_of("starcoder2", "Starcoder2ForCausalLM", "bfloat16", usual, drop, rope, more)


def _stablelm(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "layer_norm_eps": 1e-5, "hidden_size": 128}
    rope = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "rope_theta": 10000}
    last = {"num_key_value_heads": 4, "tie_word_embeddings": False, "use_qkv_bias": False, "attention_dropout": ...}
    return config_of("stablelm", "StableLmForCausalLM", "bfloat16", usual, rope, last, more)


def _smollm3(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu"}
    layers = {"layer_types": [_FULL] * 4, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]}
    last = {"max_window_layers": 28, "mlp_bias": False, "pad_token_id": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6}
    rope = {"rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False}
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 65536}
    return config_of("smollm3", "SmolLM3ForCausalLM", "bfloat16", usual, layers, last, rope, sizes, more)


def _exaone4(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 361, "hidden_act": "silu", "head_dim": 16, "pad_token_id": 0}
    rope = {"rope_scaling": {"factor": 16.0, **_LLAMA_3_ROPE, "rope_type": "llama3"}, "rope_theta": 1000000}
    last = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return config_of("exaone4", "Exaone4ForCausalLM", "bfloat16", usual, rope, last, {"num_hidden_layers": 4}, more)


def _opt(**more: Any) -> dict[str, Any]:
    usual = {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"}
    ids = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "prefix": "</s>", "dropout": 0.1, "layerdrop": 0.0}
    sizes = {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 2048, "init_std": 0.02}
    gone = dict.fromkeys(("intermediate_size", "num_key_value_heads", "initializer_range"), ...)
    return config_of("opt", "OPTForCausalLM", "float16", usual, ids, sizes, gone, {"do_layer_norm_before": True}, more)


def _seed_oss(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": True, "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 32}
    last = {"hidden_act": "silu", "mlp_bias": False, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-6}
    rope = {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "max_position_embeddings": 524288}
    last |= {"attention_dropout": 0.1, "tie_word_embeddings": False}
    return config_of("seed_oss", "SeedOssForCausalLM", "bfloat16", usual, last, rope, more)


def _ernie4_5(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "pad_token_id": 0}
    last = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0}
    flags = {"tie_word_embeddings": True, "use_bias": False, "use_cache": False, "attention_dropout": ...}
    return config_of("ernie4_5", "Ernie4_5ForCausalLM", "bfloat16", usual, last, flags, more)


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def _gpt_oss(**more: Any) -> dict[str, Any]:
    usual = {
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 32,
        "hidden_act": "silu",
    }
    lengths = {"initial_context_length": 4096, "max_position_embeddings": 131072, "sliding_window": 128}
    experts = {"num_experts_per_tok": 4, "num_local_experts": 6, "output_router_logits": False, "swiglu_limit": 7.0}
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    rope |= {"rope_type": "yarn", "truncate": False}
    given = {"rms_norm_eps": 1e-5, "rope_scaling": rope, "rope_theta": 150000, "router_aux_loss_coef": 0.9}
    given |= {"layer_types": [_WINDOW, _FULL, _WINDOW], "tie_word_embeddings": False}
    return config_of("gpt_oss", "GptOssForCausalLM", "bfloat16", usual, lengths, experts, given, more)


PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    **PUBLISHED_EXPERTS,
    **PUBLISHED_MORE,
    **PUBLISHED_RECURRENT,
    **PUBLISHED_WHOLE,
    "arcee": {
        "AFM-4.5B": config_of(
            *("arcee", "ArceeForCausalLM", "bfloat16"),
            {
                "attention_bias": False,
                "bos_token_id": 128000,
                "eos_token_id": 128003,
                "head_dim": 16,
                "mlp_bias": False,
            },
            {"hidden_act": "relu2", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
            rope_scaling={
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0},
                **{"original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"},
            },
            tie_word_embeddings=False,
        )
    },
    "cohere2": {
        "c4ai-command-r7b-12-2024": _cohere2(use_parallel_embedding=True),
        "c4ai-command-a-03-2025": _cohere2(max_position_embeddings=131072, use_qk_norm=False),
        "command-r7b-arabic-02-2025": _cohere2(sliding_window_pattern=..., layer_types=[_WINDOW] * 3 + [_FULL]),
    },
    "ernie4_5": {
        "ERNIE-4.5-0.3B-PT": _ernie4_5(),
        "ERNIE-4.5-0.3B-Base-PT": _ernie4_5(use_cache=True),
        "ERNIE-4.5-0.3B-Paddle": _ernie4_5(num_key_value_heads=1, head_dim=16),
    },
    "exaone4": {
        "EXAONE-4.0-32B": _exaone4(
            layer_types=[_WINDOW] * 3 + [_FULL], sliding_window=9, sliding_window_pattern="LLLG"
        ),
        "EXAONE-4.0-1.2B": _exaone4(
            layer_types=[_FULL] * 4, sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True
        ),
        "EXAONE-4.0.1-32B": _exaone4(layer_types=[_WINDOW] * 3 + [_FULL], sliding_window=9),
    },
    "gemma": {
        "gemma-2b": _gemma("gemma", "GemmaForCausalLM", hidden_act="gelu", num_key_value_heads=1, rope_scaling=None),
        "gemma-1.1-2b-it": _gemma(
            *("gemma", "GemmaForCausalLM"), hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"
        ),
        "codegemma-7b": _gemma(
            *("gemma", "GemmaForCausalLM"), hidden_act="gelu_pytorch_tanh", hidden_activation=None, head_dim=16
        ),
    },
    "gemma2": {
        "gemma-2-2b": _gemma2(),
        "gemma-2-9b-it": _gemma2(eos_token_id=[1, 107], sliding_window_size=4096),
        "gemma-2-27b": _gemma2(query_pre_attn_scalar=144, _attn_implementation="eager"),
    },
    "gemma3_text": {
        "gemma-3-1b-it": _gemma3(
            eos_token_id=[1, 106], sliding_window_pattern=6, num_key_value_heads=1, cache_implementation="hybrid"
        ),
        "gemma-3-270m": _gemma3(
            layer_types=[_WINDOW, _WINDOW, _FULL], _sliding_window_pattern=6, use_bidirectional_attention=False
        ),
        "gemma-3-4b-it, its text": _gemma3(
            rope_scaling={"factor": 8.0, "rope_type": "linear"}, max_position_embeddings=131072, num_hidden_layers=6
        ),
    },
    "glm4": {
        "GLM-4-9B-0414": _glm4(attention_bias=True),
        "GLM-4-32B-0414": _glm4(attention_bias=False, rms_norm_eps=1e-5),
        "GLM-Z1-9B-0414": _glm4(attention_bias=True, rope_scaling={"rope_type": "yarn", **_YARN}),
    },
    "gpt2": {
        "gpt2": _GPT2,
        "gpt2-xl": {**_GPT2, "output_past": True},
        "distilgpt2": {**_GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        "Cerebras-GPT-111M": {
            **{key: value for key, value in _GPT2.items() if key != "task_specific_params"},
            **{"activation_function": "gelu", "n_inner": 96, "scale_attn_weights": True, "n_positions": 2048},
        },
    },
    "gpt_neox": {
        "pythia-70m": _neox(),
        "gpt-neox-20b": _neox(hidden_act="gelu_fast", attention_probs_dropout_prob=0, hidden_dropout_prob=0),
        "RedPajama-INCITE-Base-3B-v1": _neox(rotary_pct=1.0, use_parallel_residual=False, classifier_dropout=0.1),
        "dolly-v2-3b": _neox(custom_pipelines={"text-generation": {"impl": "instruct_pipeline.TextGeneration"}}),
    },
    "gpt_oss": {
        "gpt-oss-20b": _gpt_oss(),
        "gpt-oss-120b": _gpt_oss(num_local_experts=12),
        "gpt-oss-20b, as saved by transformers 5": _gpt_oss(
            rope_scaling=...,
            rope_theta=...,
            rope_parameters={**_gpt_oss()["rope_scaling"], "rope_theta": 150000.0},
        ),
    },
    "granite": {
        "granite-3.0-2b-instruct": _granite(rope_theta=10000.0),
        "granite-3.1-8b-base": _granite(rope_theta=5000000.0, max_position_embeddings=131072, logits_scaling=16.0),
        "granite-3.3-8b-instruct": _granite(
            rope_theta=10000000.0, attention_multiplier=0.0078125, attention_dropout=0.0
        ),
    },
    "helium": {
        "helium-1-preview-2b": config_of(
            *("helium", "HeliumForCausalLM", "bfloat16"),
            {"attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu"},
            {"max_position_embeddings": 4096, "mlp_bias": False, "pad_token_id": 3, "rms_norm_eps": 1e-8},
            rope_theta=100000.0,
            tie_word_embeddings=False,
        )
    },
    "llama": {
        "Llama-2-7b-hf": _llama("float16", num_key_value_heads=4),
        "Llama-3.1-8B-Instruct": _llama(
            **_LLAMA_3, rope_scaling={"factor": 8.0, **_LLAMA_3_ROPE, "rope_type": "llama3"}
        ),
        "Llama-3.2-1B": _llama(
            **_LLAMA_3,
            head_dim=16,
            rope_scaling={"factor": 32.0, **_LLAMA_3_ROPE, "rope_type": "llama3"},
            tie_word_embeddings=True,
        ),
        "SmolLM2-135M": _llama(
            **{"bos_token_id": 0, "eos_token_id": 0, "is_llama_config": True, "max_position_embeddings": 8192},
            **{"mlp_bias": False, "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True},
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        ),
        "deepseek-coder-1.3b-base": _llama(
            **{"bos_token_id": 32013, "eos_token_id": 32014, "max_position_embeddings": 16384, "rope_theta": 100000},
            rope_scaling={"factor": 4.0, "type": "linear"},
        ),
        "Yi-6B": _llama(pad_token_id=0, rope_theta=5000000.0),
    },
    "mistral": {
        "Mistral-7B-v0.1": _mistral(max_position_embeddings=32768, rope_theta=10000.0, sliding_window=9),
        "Mistral-7B-Instruct-v0.3": _mistral(max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None),
        "Mistral-Nemo-Base-2407": _mistral(
            max_position_embeddings=128000, rope_theta=1000000.0, sliding_window=None, head_dim=32
        ),
        "Mistral-Small-24B-Base-2501": _mistral(
            max_position_embeddings=32768, rope_theta=100000000.0, sliding_window=None, head_dim=32
        ),
    },
    "olmo2": {
        "OLMo-2-1124-7B": _olmo(2),
        "OLMo-2-0325-32B": _olmo(2, num_key_value_heads=2, bos_token_id=None),
        "OLMo-2-0425-1B-Instruct": _olmo(2, torch_dtype="bfloat16", use_cache=False),
    },
    "olmo3": {
        "Olmo-3-7B-Instruct": _olmo(3, **_OLMO3, rope_scaling=_OLMO3_ROPE, max_position_embeddings=65536),
        "Olmo-3-32B-Think": _olmo(
            3, **_OLMO3, rope_scaling=_OLMO3_ROPE, max_position_embeddings=65536, num_key_value_heads=2
        ),
        "Olmo-3-1025-7B, before long texts": _olmo(3, **_OLMO3, max_position_embeddings=8192),
    },
    "opt": {
        "opt-125m": _opt(),
        "opt-350m": _opt(do_layer_norm_before=False, word_embed_proj_dim=32),
        "opt-1.3b": _opt(_name_or_path="opt-1.3b", activation_dropout=0.0),
        "galactica-125m": _opt(
            activation_function="gelu", learned_embeddings=True, scale_embeddings=False, enable_bias=True
        ),
    },
    "phi": {
        "phi-2": _phi(
            **{"bos_token_id": 50256, "eos_token_id": 50256, "num_key_value_heads": 4, "partial_rotary_factor": 0.4},
            **{"hidden_size": 160, "resid_pdrop": 0.1},
        ),
        "phi-1": _phi(),
        "phi-1_5": _phi(torch_dtype="float32", num_key_value_heads=4),
    },
    "phi3": {
        "Phi-3-mini-4k-instruct": _phi3(pad_token_id=1, sliding_window=9),
        "Phi-3-mini-128k-instruct": _phi3(
            max_position_embeddings=131072, rope_scaling=_long(8, "longrope"), sliding_window=262144
        ),
        "Phi-4-mini-instruct": _phi3(
            **{
                "embd_pdrop": 0.0,
                "full_attn_mod": 1,
                "interpolate_factor": 1,
                "lm_head_bias": False,
                "mlp_bias": False,
            },
            **{"max_position_embeddings": 131072, "num_key_value_heads": 2, "partial_rotary_factor": 0.75},
            **{"rope_scaling": _long(6, "longrope"), "sliding_window": 262144, "tie_word_embeddings": True},
        ),
        "phi-4": _phi3(
            **{"auto_map": ..., "max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
            **{"num_key_value_heads": 2, "rope_theta": 250000, "sliding_window": None},
        ),
    },
    "qwen2": {
        "Qwen2.5-0.5B": _qwen(
            2, max_position_embeddings=32768, sliding_window=32768, tie_word_embeddings=True, use_mrope=False
        ),
        "Qwen2.5-7B-Instruct": _qwen(
            2, max_position_embeddings=32768, sliding_window=131072, tie_word_embeddings=False
        ),
        "Qwen2.5-7B-Instruct, with YaRN as its card says": _qwen(
            2, max_position_embeddings=32768, rope_scaling={**_YARN, "type": "yarn"}, tie_word_embeddings=False
        ),
        "DeepSeek-R1-Distill-Qwen-1.5B": _qwen(
            **{"version": 2, "bos_token_id": 151646, "eos_token_id": 151643, "max_position_embeddings": 131072},
            **{"rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "use_mrope": False},
        ),
    },
    "qwen3": {
        "Qwen3-0.6B": _qwen(
            **{"version": 3, "attention_bias": False, "head_dim": 32, "max_position_embeddings": 40960},
            **{"rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True},
        ),
        "Qwen3-8B": _qwen(
            **{"version": 3, "attention_bias": False, "head_dim": 32, "max_position_embeddings": 40960},
            **{"rope_scaling": {"rope_type": "yarn", **_YARN}, "sliding_window": None, "tie_word_embeddings": False},
        ),
        "Qwen3-4B-Instruct-2507": _qwen(
            **{"version": 3, "attention_bias": False, "head_dim": 32, "max_position_embeddings": 262144},
            **{"rope_theta": 5000000, "rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True},
        ),
    },
    "seed_oss": {
        "Seed-OSS-36B-Instruct": _seed_oss(),
        "Seed-OSS-36B-Base": _seed_oss(use_cache=False),
        "Seed-OSS-36B-Base-woSyn": _seed_oss(rope_scaling=None),
    },
    "smollm3": {
        "SmolLM3-3B": _smollm3(),
        "SmolLM3-3B-Base": _smollm3(eos_token_id=128001, max_position_embeddings=65536, rope_theta=2000000.0),
        "SmolLM3-3B, with YaRN as its card says": _smollm3(
            rope_scaling={"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"}
        ),
    },
    "stablelm": {
        "stablelm-3b-4e1t": _stablelm(),
        "stablelm-2-1_6b": _stablelm(
            **{"bos_token_id": 100257, "eos_token_id": 100257, "hidden_dropout": 0.0, "qk_layernorm": False},
            **{"rope_scaling": None, "use_parallel_residual": False, "use_qkv_bias": True},
        ),
        "stable-code-3b": _stablelm(max_position_embeddings=16384, rope_theta=1000000, eos_token_id=0),
    },
    "starcoder2": {
        "starcoder2-3b": _starcoder2(),
        "starcoder2-7b": _starcoder2(
            **{"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "mlp_type": "default"},
            **{"norm_type": "layer_norm", "rope_theta": 1000000, "scale_attention_softmax_in_fp32": True},
        ),
        "starcoder2-15b": _starcoder2(rope_theta=100000, tie_word_embeddings=False),
    },
}
"""model_type -> model name -> ``config.json``. The default tests compare only the first model of each family; nightly
tests compare all."""
