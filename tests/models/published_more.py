"""``config.json`` of further published dense models, as on the Hub except for smaller sizes and padding token ids."""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of

__all__ = ["PUBLISHED_MORE"]

_FULL, _WINDOW = "full_attention", "sliding_attention"


def _cwm(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 32, "hidden_act": "silu"}
    layers = {"layer_types": [_FULL, _WINDOW, _WINDOW, _WINDOW, _FULL], "num_hidden_layers": 5, "sliding_window": 9}
    rope = {"max_position_embeddings": 131072, "rope_scaling": _CWM_ROPE, "rope_theta": 1000000.0}
    last = {"mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return config_of("cwm", "CwmForCausalLM", "bfloat16", usual, layers, rope, last, more)


_CWM_ROPE = {
    **{"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}


def _glm(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 32, "hidden_act": "silu"}
    given = {"max_position_embeddings": 131072, "pad_token_id": 3, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0}
    return config_of("glm", "GlmForCausalLM", "bfloat16", usual, given, {"tie_word_embeddings": False}, more)


_HUNYUAN_ROPE = {
    **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"type": "dynamic"},
}


def _hunyuan(**more: Any) -> dict[str, Any]:
    heads = {"add_classification_head": False, "class_num": 0, "dense_list": [64, 0], "pool_type": "last"}
    usual = {"attention_bias": False, "attention_dropout": 0.1, "attention_head_dim": 32, "cla_share_factor": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 127960, "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4}
    tokens |= {"mask_init_id": 12, "pad_id": 7, "pad_token_id": 7, "sep_token_id": 127962, "org_vocab_size": 128}
    tokens |= {"text_end_id": 7, "text_start_id": 6}
    given = {"head_dim": 32, "hidden_act": "silu", "mlp_bias": False, "norm_type": "rms", "pretraining_tp": 1}
    rope = {"rms_norm_eps": 1e-5, "rope_scaling": _HUNYUAN_ROPE, "rope_theta": 10000.0, "use_rotary_pos_emb": True}
    last = {"tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True}
    name = "HunYuanDenseV1ForCausalLM"
    return config_of("hunyuan_v1_dense", name, "bfloat16", heads, usual, tokens, given, rope, last, more)


_INTERNLM3_CODE = {
    "AutoConfig": "configuration_internlm3.InternLM3Config",
    "AutoModel": "modeling_internlm3.InternLM3Model",
    "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM",
}


def _ministral(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    layers = {"layer_types": [_FULL, _WINDOW, _WINDOW, _WINDOW, _FULL], "num_hidden_layers": 5, "sliding_window": 9}
    given = {"max_position_embeddings": 32768, "rope_theta": 100000000.0, "tie_word_embeddings": False}
    return config_of("ministral", "MinistralForCausalLM", "bfloat16", usual, layers, given, more)


def _ministral3(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "pad_token_id": 11}
    rope = {"beta_slow": 1.0, "mscale": 1.0, "type": "yarn", **rope}
    given = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": rope, "sliding_window": None}
    last = {"tie_word_embeddings": False}
    return config_of("ministral3", "Ministral3ForCausalLM", "bfloat16", usual, given, last, more)


def _cohere(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu"}
    given = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "pad_token_id": 0}
    last = {"model_max_length": 131072, "rope_theta": 8000000.0, "use_qk_norm": False, "num_key_value_heads": 4}
    return config_of("cohere", "CohereForCausalLM", "float16", usual, given, last, more)


_EXAONE_CODE = {
    "AutoConfig": "configuration_exaone.ExaoneConfig",
    "AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM",
    "AutoModelForSequenceClassification": "modeling_exaone.ExaoneForSequenceClassification",
}


def _exaone(**more: Any) -> dict[str, Any]:
    usual = {"activation_function": "silu", "auto_map": _EXAONE_CODE, "bos_token_id": 1, "embed_dropout": 0.0}
    given = {"eos_token_id": 361, "head_dim": 16, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 32768}
    rope = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    last = {"num_layers": 3, "pad_token_id": 0, "rope_scaling": {**rope, "original_max_position_embeddings": 8192}}
    last |= {"num_hidden_layers": ..., "rope_theta": 1000000, "tie_word_embeddings": False}
    return config_of("exaone", "ExaoneForCausalLM", "bfloat16", usual, given, last, more)


_FALCON_CODE = {
    "AutoConfig": "configuration_falcon.FalconConfig",
    "AutoModel": "modeling_falcon.FalconModel",
    "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
}


def _falcon(**more: Any) -> dict[str, Any]:
    usual = {"alibi": False, "apply_residual_connection_post_layernorm": False, "auto_map": _FALCON_CODE, "bias": False}
    given = {"bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5}
    last = {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}
    gone = dict.fromkeys(("intermediate_size", "num_key_value_heads"), ...)
    return config_of("falcon", "FalconForCausalLM", "bfloat16", usual, given, last, gone, more)


def _gpt_neo(**more: Any) -> dict[str, Any]:
    usual = {"activation_function": "gelu_new", "attention_layers": ["global", "local", "global"], "num_heads": 4}
    given = {"attention_types": [[["global", "local"], 1], [["global"], 1]], "bos_token_id": 50256, "num_layers": 3}
    last = {"embed_dropout": 0, "eos_token_id": 50256, "gradient_checkpointing": False, "intermediate_size": None}
    last |= {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "resid_dropout": 0,
        "summary_type": "cls_index",
    }
    gone = dict.fromkeys(("num_attention_heads", "num_hidden_layers", "num_key_value_heads"), ...)
    return config_of("gpt_neo", "GPTNeoForCausalLM", "float32", usual, given, last, gone, {"window_size": 9}, more)


PUBLISHED_MORE: dict[str, dict[str, dict[str, Any]]] = {
    "cohere": {
        "c4ai-command-r-v01": _cohere(),
        "aya-expanse-8b": _cohere(rope_theta=10000, num_key_value_heads=2, logit_scale=0.125),
        "c4ai-command-r-08-2024": _cohere(rope_theta=4000000.0, num_key_value_heads=2, max_position_embeddings=131072),
    },
    "cwm": {
        "cwm": _cwm(),
        "cwm, as saved by transformers 5": _cwm(
            rope_scaling=..., rope_theta=..., rope_parameters={**_CWM_ROPE, "rope_theta": 1000000.0}
        ),
    },
    "exaone": {
        "EXAONE-3.5-7.8B-Instruct": _exaone(),
        "EXAONE-3.5-2.4B-Instruct": _exaone(tie_word_embeddings=True),
        "EXAONE-3.0-7.8B-Instruct": _exaone(max_position_embeddings=4096, rope_scaling=..., rope_theta=500000.0),
    },
    "falcon": {
        "falcon-7b": _falcon(),
        "falcon-40b": _falcon(new_decoder_architecture=True, num_kv_heads=2, multi_query=True),
        "falcon-11B": _falcon(
            **{"auto_map": ..., "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 256, "num_kv_heads": 2},
            **{"max_position_embeddings": 8192, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            **{"rope_scaling": None, "rope_theta": 500042.0, "tie_word_embeddings": False},
        ),
    },
    "glm": {
        "glm-4-9b-chat-hf": _glm(),
        "glm-4-9b-hf": _glm(max_position_embeddings=8192),
        "glm-4-9b-chat-1m-hf": _glm(max_position_embeddings=1048576, num_key_value_heads=4, rope_theta=100000000.0),
    },
    "gpt_neo": {
        "gpt-neo-125m": _gpt_neo(),
        "TinyStories-33M": _gpt_neo(max_position_embeddings=512, embed_dropout=0.0),
    },
    "hunyuan_v1_dense": {
        "Hy-MT2-7B": _hunyuan(max_position_embeddings=262144),
        "HunyuanImage-2.1, its reprompt": _hunyuan(max_position_embeddings=32768, use_cache=False),
    },
    "hyperclovax": {
        "HyperCLOVAX-SEED-Think-14B": config_of(
            *("hyperclovax", "HyperCLOVAXForCausalLM", "bfloat16"),
            {
                "auto_map": {
                    "AutoConfig": "configuration_hyperclovax.HyperCLOVAXConfig",
                    "AutoModel": "modeling_hyperclovax.HyperCLOVAXModel",
                    "AutoModelForCausalLM": "modeling_hyperclovax.HyperCLOVAXForCausalLM",
                }
            },
            {"attention_bias": False, "attention_multiplier": 0.0078125, "bos_token_id": 100257, "head_dim": 16},
            {"embedding_multiplier": 10.0, "end_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu"},
            {"logits_scaling": 0.125, "max_position_embeddings": 131072, "mlp_bias": False, "pad_token_id": 0},
            {"pretraining_tp": 1, "residual_multiplier": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None},
            {"rope_theta": 100000000, "tie_word_embeddings": False, "use_post_norm": True},
        ),
    },
    "internlm3": {
        "internlm3-8b-instruct": config_of(
            *("internlm3", "InternLM3ForCausalLM", "bfloat16"),
            {"auto_map": _INTERNLM3_CODE, "bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 32},
            {"hidden_act": "silu", "max_position_embeddings": 32768, "pad_token_id": 2, "qkv_bias": False},
            {"rms_norm_eps": 1e-5, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000},
            tie_word_embeddings=False,
        ),
    },
    "ministral": {
        "Ministral-8B-Instruct-2410, with its layers": _ministral(),
        "Ministral-8B-Instruct-2410, without": _ministral(layer_types=...),
    },
    "ministral3": {
        "Ministral-3-8B-Base-2512, its text": _ministral3(
            {
                **{"beta_fast": 32.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 262144},
                **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
            }
        ),
        "Devstral-Small-2-24B-Instruct-2512, its text": _ministral3(
            {
                **{"beta_fast": 32.0, "factor": 48.0, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_theta": 100000000.0, "rope_type": "yarn"},
            }
        ),
        "Devstral-2-123B-Instruct-2512": _ministral3(
            {
                **{"beta_fast": 4.0, "factor": 64.0, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0},
                **{"original_max_position_embeddings": 4096, "rope_theta": 1000000.0, "rope_type": "yarn"},
            }
        ),
    },
}
"""model_type -> model name -> ``config.json``: a part of :data:`tests.models.published.PUBLISHED`."""
