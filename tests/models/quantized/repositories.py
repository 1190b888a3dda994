"""More than a hundred of the most used repositories with quantised weights, as layouts: family, format and exceptions.

Written from public knowledge of the model pages. Sizes are small; names, dtypes and settings are those of the
repository. A repository that is not read has the words of its refusal. A model without a native family runs through
transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["REPOSITORIES", "Repository"]

_FLOATS: Final = r"lm_head|embed|norm|mlp\.gate\.|router|shared_expert_gate|conv1d|A_log|dt_bias"
"""Parts of the names of weights that are not quantised in most layouts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One repository."""

    name: str
    family: str
    """``model_type`` of the model; of a GGUF file, the value of ``general.architecture`` if the file is refused."""
    layout: str
    """Key of the layouts of published_settings.py, or, of a GGUF file, the name of its mix of block types."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the family's tiny config that differ."""
    floats: str = _FLOATS
    """Regular expression of the weights that stay floats."""
    whole: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of ``config.json`` around a ``text_config``; empty if the text model is the whole model."""
    prefix: str = ""
    """Beginning of the names of tensors in place of ``model.``, for a model within another."""
    place: str = "config.json"
    """Where the settings are: ``config.json``, ``text_config``, ``hf_quant_config.json`` or ``quantization``."""
    refused: tuple[str, ...] = ()
    """Words of the refusal: the name of the format or the architecture first, and the remedy."""

    @property
    def is_gguf(self) -> bool:
        return self.name.lower().endswith("gguf")


def _of(names: str, family: str, layout: str, **more: Any) -> list[Repository]:
    return [Repository(name=name, family=family, layout=layout, **more) for name in names.split()]


_BIASED: Final = {"attention_bias": True}
_TIED: Final = {"tie_word_embeddings": True}
_NEMO: Final = {"head_dim": 64, "sliding_window": None}
_NO_WINDOW: Final = {"sliding_window": None}
_EMBEDDED: Final = r"norm|mlp\.gate\."
"""As :data:`_FLOATS` for MLX, which quantises the embedding and the head too."""
_GEMMA: Final = {"head_dim": 64, "sliding_window": 9}
_MISTRAL3: Final = {
    **{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10},
    **{"multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2},
    "vision_config": {
        **{"head_dim": 64, "hidden_act": "gelu", "hidden_size": 1024, "image_size": 1540, "model_type": "pixtral"},
        **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0},
    },
    "vision_feature_layer": -1,
}
_MISTRAL3_TIES: Final = {**_MISTRAL3, "tie_word_embeddings": False}
_OTHER_GGUF: Final = ("is not supported", "general.architecture")

_GGUF: Final = [
    *_of("bartowski/Llama-3.2-3B-Instruct-GGUF unsloth/Llama-3.2-1B-Instruct-GGUF", "llama", "Q4_K_M", settings=_TIED),
    *_of("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF TheBloke/Llama-2-7B-Chat-GGUF", "llama", "Q4_K_M"),
    *_of("unsloth/Llama-3.3-70B-Instruct-GGUF", "llama", "Q3_K_M"),
    *_of("unsloth/DeepSeek-R1-Distill-Llama-8B-GGUF", "llama", "Q6_K"),
    *_of("TheBloke/Mistral-7B-Instruct-v0.2-GGUF", "mistral", "Q4_K_M", settings=_NO_WINDOW),
    *_of("bartowski/Mistral-Nemo-Instruct-2407-GGUF", "mistral", "Q5_K_M", settings=_NEMO),
    *_of("unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF", "mistral", "IQ4_XS", settings=_NEMO),
    *_of("TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF", "mixtral", "Q4_K_M"),
    *_of("Qwen/Qwen2.5-7B-Instruct-GGUF Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "qwen2", "Q4_K_M"),
    *_of("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2", "Q8_0", settings=_TIED),
    *_of("bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", "qwen2", "Q2_K"),
    *_of("Qwen/Qwen3-8B-GGUF unsloth/Qwen3-8B-GGUF", "qwen3", "Q4_K_M", settings={"head_dim": 64}),
    *_of("Qwen/Qwen3-0.6B-GGUF", "qwen3", "Q8_0", settings={**_TIED, "head_dim": 64}),
    *_of("unsloth/Qwen3-4B-Instruct-2507-GGUF", "qwen3", "IQ4_XS", settings={**_TIED, "head_dim": 64}),
    *_of("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", "qwen3_moe", "Q4_K_M", settings={"norm_topk_prob": True}),
    *_of("unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", "qwen3_moe", "Q2_K", settings={"norm_topk_prob": True}),
    *_of("bartowski/gemma-2-9b-it-GGUF", "gemma2", "Q4_K_M", settings={"query_pre_attn_scalar": 32}),
    *_of("ggml-org/gemma-3-4b-it-GGUF", "gemma3_text", "Q4_K_M", settings={"query_pre_attn_scalar": 32}),
    *_of("google/gemma-3-4b-it-qat-q4_0-gguf", "gemma3_text", "Q4_0", settings={"query_pre_attn_scalar": 32}),
    *_of("microsoft/Phi-3-mini-4k-instruct-gguf", "phi3", "Q4_K_M", settings={"sliding_window": 9}),
    *_of("ggml-org/gpt-oss-20b-GGUF unsloth/gpt-oss-20b-GGUF", "gpt_oss", "MXFP4_MOE", settings={"swiglu_limit": 7.0}),
    *_of("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "llama", "Q4_K_M", settings={**_TIED, "rms_norm_eps": 1e-5}),
    *_of("ggml-org/SmolLM3-3B-GGUF", "smollm3", "Q4_K_M"),
    *_of("LiquidAI/LFM2-1.2B-GGUF", "lfm2", "Q4_K_M"),
    *_of("ibm-granite/granite-3.3-8b-instruct-GGUF", "granite", "Q4_K_M"),
    *_of("second-state/StarCoder2-7B-GGUF", "starcoder2", "Q5_K_M", settings=_NO_WINDOW),
    *_of("unsloth/DeepSeek-R1-GGUF unsloth/Kimi-K2-Instruct-GGUF", "deepseek2", "", refused=_OTHER_GGUF),
    *_of("unsloth/gemma-3n-E4B-it-GGUF", "gemma3n", "", refused=_OTHER_GGUF),
]
_AWQ: Final = [
    *_of("Qwen/Qwen2.5-7B-Instruct-AWQ Qwen/Qwen2.5-32B-Instruct-AWQ Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2", "awq"),
    *_of("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ casperhansen/deepseek-r1-distill-qwen-32b-awq", "qwen2", "awq"),
    *_of("Qwen/Qwen3-8B-AWQ Qwen/Qwen3-32B-AWQ", "qwen3", "awq", settings={"head_dim": 64}),
    *_of("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "llama", "awq"),
    *_of("casperhansen/llama-3.3-70b-instruct-awq", "llama", "awq"),
    *_of("TheBloke/Llama-2-7B-Chat-AWQ", "llama", "awq, older", settings={"num_key_value_heads": 4}),
    *_of("TheBloke/Mistral-7B-Instruct-v0.2-AWQ", "mistral", "awq, older", settings=_NO_WINDOW),
    *_of("stelterlab/Mistral-Small-24B-Instruct-2501-AWQ", "mistral", "awq", settings=_NEMO),
    *_of("QuantTrio/Qwen3-30B-A3B-Instruct-2507-AWQ", "qwen3_moe", "awq of experts"),
]
_GPTQ: Final = [
    *_of("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4", "qwen2", "gptq"),
    *_of("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2", "gptq 8 bits"),
    *_of("TheBloke/Llama-2-7B-Chat-GPTQ", "llama", "gptq, older", settings={"num_key_value_heads": 4}),
    *_of("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "mistral", "gptq in another order", settings=_NO_WINDOW),
    *_of("hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4", "llama", "gptq"),
    *_of("RedHatAI/Mistral-7B-Instruct-v0.3-GPTQ-4bit", "mistral", "gptq", settings=_NO_WINDOW),
    *_of("ModelCloud/DeepSeek-R1-Distill-Qwen-7B-gptqmodel-4bit-vortex-v2", "qwen2", "gptqmodel"),
    *_of("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "qwen3_moe", "gptqmodel of experts"),
]
_FP8: Final = [
    *_of("Qwen/Qwen3-8B-FP8 Qwen/Qwen3-32B-FP8 Qwen/Qwen3-4B-Instruct-2507-FP8", "qwen3", "fp8 in blocks"),
    *_of("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3_moe", "fp8 in blocks, of experts"),
    *_of("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3_moe", "fp8 in blocks, of experts"),
    *_of("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "qwen3_next", "fp8 in blocks, of experts"),
    *_of("RedHatAI/Meta-Llama-3-8B-Instruct-FP8", "llama", "fp8 static"),
    *_of("RedHatAI/Meta-Llama-3-8B-Instruct-FP8-KV", "llama", "fp8 static, and KV"),
    *_of(
        *("mistralai/Ministral-3-8B-Instruct-2512", "ministral3", "fp8 of Mistral"),
        **{"whole": _MISTRAL3_TIES, "prefix": "language_model.model.", "settings": {"head_dim": 64}},
    ),
    *_of(
        *("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama", "fbgemm"),
        floats=_FLOATS + r"|self_attn|layers\.0\.mlp",
    ),
    *_of("deepseek-ai/DeepSeek-R1 deepseek-ai/DeepSeek-V3.1", "deepseek_v3", "fp8 in blocks"),
]
_COMPRESSED: Final = [
    *_of("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "llama", "FP8"),
    *_of("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama", "w8a8"),
    *_of("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16", "llama", "w8a16"),
    *_of("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama", "w4a16"),
    *_of(
        "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic RedHatAI/Llama-3.2-3B-Instruct-FP8-dynamic", "llama", "FP8-dynamic"
    ),
    *_of("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", "qwen2", "w8a8"),
    *_of("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen3", "FP8-dynamic"),
    *_of("RedHatAI/gemma-2-9b-it-FP8", "gemma2", "FP8", settings=_GEMMA),
    *_of(
        *("RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-FP8-dynamic", "mistral", "FP8-dynamic"),
        **{"whole": _MISTRAL3, "prefix": "language_model.model.", "settings": _NEMO},
    ),
    *_of(
        *("RedHatAI/Mistral-Small-3.2-24B-Instruct-2506-quantized.w4a16", "mistral", "w4a16"),
        **{"whole": _MISTRAL3, "prefix": "language_model.model.", "settings": _NEMO, "place": "text_config"},
    ),
    *_of("RedHatAI/Llama-3.1-8B-Instruct-NVFP4", "llama", "NVFP4"),
    *_of("cpatonn/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit", "qwen3_moe", "w4a16 in groups of 32"),
    *_of("zai-org/GLM-4.5-Air-FP8", "glm4_moe", "FP8-dynamic"),
]
_MODELOPT: Final = [
    *_of("nvidia/Llama-3.1-8B-Instruct-FP8", "llama", "modelopt FP8", place="hf_quant_config.json"),
    *_of("nvidia/Llama-3.3-70B-Instruct-FP4", "llama", "modelopt FP4", place="hf_quant_config.json"),
    *_of("nvidia/Qwen3-30B-A3B-NVFP4", "qwen3_moe", "modelopt NVFP4"),
    *_of(
        *("nvidia/DeepSeek-R1-FP4", "deepseek_v3", "modelopt FP4"),
        **{"floats": _FLOATS + "|self_attn", "place": "hf_quant_config.json"},
    ),
]
_BNB: Final = [
    *_of("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama", "nf4", settings=_TIED),
    *_of("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama", "nf4"),
    *_of("unsloth/mistral-7b-instruct-v0.3-bnb-4bit", "mistral", "nf4", settings=_NO_WINDOW),
    *_of("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "qwen2", "nf4"),
    *_of("unsloth/gemma-2-9b-it-bnb-4bit", "gemma2", "nf4", settings=_GEMMA),
    *_of(
        "unsloth/Phi-3-mini-4k-instruct-bnb-4bit", "mistral", "nf4", settings={**_NO_WINDOW, "num_key_value_heads": 4}
    ),
    *_of(
        *("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3", "nf4 with layers left out"),
        floats=_FLOATS + r"|layers\.0\.mlp|layers\.1\.self_attn",
    ),
]
_MLX: Final = [
    *_of(
        "mlx-community/Llama-3.2-3B-Instruct-4bit",
        "llama",
        "mlx",
        place="quantization",
        floats=_EMBEDDED,
        settings=_TIED,
    ),
    *_of("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "llama", "mlx", place="quantization", floats=_EMBEDDED),
    *_of(
        *("mlx-community/Mistral-7B-Instruct-v0.3-4bit", "mistral", "mlx"),
        **{"place": "quantization", "floats": _EMBEDDED, "settings": _NO_WINDOW},
    ),
    *_of("mlx-community/Qwen2.5-7B-Instruct-4bit", "qwen2", "mlx", place="quantization", floats=_EMBEDDED),
    *_of("mlx-community/Qwen3-8B-8bit", "qwen3", "mlx 8 bits", place="quantization", floats=_EMBEDDED),
    *_of(
        *("lmstudio-community/Qwen3-30B-A3B-Instruct-2507-MLX-4bit", "qwen3_moe", "mlx affine"),
        **{"place": "quantization", "floats": _EMBEDDED, "refused": ("MLX: ", "qwen3_moe", "GGUF")},
    ),
]
_MORE: Final = [
    *_of("Intel/Qwen2-7B-int4-inc", "qwen2", "autoround"),
    *_of("Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound", "qwen3_moe", "autoround of experts"),
    *_of("kaitchup/Llama-3.2-3B-Instruct-AutoRound-GPTQ-4bit", "llama", "autoround as gptq"),
    *_of("openai/gpt-oss-20b openai/gpt-oss-120b", "gpt_oss", "mxfp4", settings={"swiglu_limit": 7.0}),
    *_of("microsoft/bitnet-b1.58-2B-4T", "bitnet", "bitnet", refused=("bitnet",)),
    *_of("mobiuslabsgmbh/Llama-3.1-8b-instruct_4bitgs64_hqq_calib", "llama", "hqq", refused=("HQQ", "GGUF")),
    *_of("pytorch/Qwen3-8B-INT4", "qwen3", "torchao", refused=("torchao", "GGUF")),
    *_of("turboderp/Llama-3.1-8B-Instruct-exl2", "llama", "exl2", refused=("EXL2", "GGUF")),
    *_of("ISTA-DASLab/Meta-Llama-3.1-70B-Instruct-AQLM-PV-2Bit-1x16", "llama", "aqlm", refused=("AQLM", "GGUF")),
]
REPOSITORIES: Final = (*_GGUF, *_AWQ, *_GPTQ, *_FP8, *_COMPRESSED, *_MODELOPT, *_BNB, *_MLX, *_MORE)
