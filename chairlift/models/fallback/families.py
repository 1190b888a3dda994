"""Families that run correctly through transformers, and those that do not, with the reasons.

``tools/survey_transformers.py`` runs each family of transformers, with tiny random weights, against transformers' eager
attention. ``tests/models/test_transformers.py`` serves each family in :data:`ALLOWED`. A family that is correct only
for short texts is refused. Block-sparse attention is an example: on a short text it equals full attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift.base.image_refusals import SEEING

__all__ = ["ALIASES", "ALLOWED", "INSIDE", "REASONS", "REFUSED", "refusal"]

_SEEN_RIGHT: Final = """
afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt codegen cohere cohere2 cohere2_moe cwm dbrx deepseek_v2
deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text
gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite
granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3
minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm
starcoder2 vaultgemma youtu
"""
ALLOWED: Final = frozenset(_SEEN_RIGHT.split())
"""Values of ``model_type`` that were tested. In addition, every checkpoint is compared with transformers when it is
loaded."""

ALIASES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
"""``model_type`` that transformers does not have -> the ``model_type`` of the same network."""

INSIDE: Final[Mapping[str, str]] = {
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
}
"""``model_type`` of a model that also reads images or sound -> the ``model_type`` of its text model, which is served
alone."""

REASONS: Final[Mapping[str, str]] = {
    "state": "some of its layers keep a recurrent state, which Chairlift's cache holds for native families only",
    "sparse": "its attention chooses blocks or tokens by an index, which Chairlift's cache does not hold",
    "own": "its layers do not attend through transformers' AttentionInterface",
    "twice": "its layers attend more than once for a token, or share one place in the cache",
    "unseen": "no tiny model of it could be made to see whether it is right",
    "mask": "its attention masks are more than causal",
    "bidirectional": "it is an encoder or has one: tokens see later ones, or another sequence",
    "rounds": "its published weights have three values, and the inputs of its matmuls are rounded to 8 bits, which"
    " Chairlift does not compute",
    "across": "its layers for images attend to them by cross attention, whose K and V Chairlift's cache does not hold",
    "several": "it reads or makes images or sound, which Chairlift does not do in this family; it reads images in "
    + ", ".join(SEEING),
}
"""Name of a reason -> the text that explains why a family is refused."""

_BY_REASON: Final[Mapping[str, str]] = {
    "state": "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid"
    " inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax"
    " nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text"
    " recurrent_gemma rwkv xlstm zamba zamba2 zaya",
    "sparse": "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text",
    "rounds": "bitnet",
    "own": "bloom blt cpmant ctrl falcon gpt_neo gpt_neox_japanese mpt openai-gpt reformer xglm xlm xlnet",
    "twice": "diffllama dory hrm_text",
    "mask": "doge",
    "bidirectional": "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert"
    " data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta"
    " roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod",
    "unseen": "cohere_compass_text",
    "across": "mllama",
    "several": "emu3 fuyu gemma4_assistant gemma4_unified gemma4_unified_assistant"
    " gemma4_unified_text git got_ocr2 moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal",
}
REFUSED: Final[Mapping[str, str]] = {
    model_type: reason for reason, names in _BY_REASON.items() for model_type in names.split()
}
"""``model_type`` that does not run correctly through transformers -> name of the reason in :data:`REASONS`."""


def refusal(model_type: Any) -> str:
    """Text that says why ``model_type`` is not served, and what to do."""
    given = f"model_type {model_type!r:.80}"
    if not isinstance(model_type, str) or model_type not in REFUSED:
        return (
            f"{given} is not supported: Chairlift has no implementation of its own, and it has not been seen right"
            " through transformers; docs/models.md lists the supported models"
        )
    return f"{given} is not supported, natively or through transformers: {REASONS[REFUSED[model_type]]}; use another"
