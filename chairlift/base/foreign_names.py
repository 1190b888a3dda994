"""Flags of other engines, and what to write for them here: llama.cpp, SGLang, TGI, Ollama, TensorRT-LLM and LightLLM.

Names in braces are Chairlift's settings. They are shown as flags on the command line, and as keywords in Python.
:mod:`chairlift.base.vllm_names` has the settings of vLLM, most of which work. Standard library only.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["FOREIGN", "answer_to"]

_ONE_DEVICE: Final = (
    "a model runs on one device here; several copies of it are {replicas} N, and {device} chooses the device"
)
_LENGTH: Final = "write {max_model_len} N"
_MODEL: Final = "write the model without a flag, after the command: a directory, a GGUF file or a Hub id"
_ROWS: Final = "write {max_num_seqs} N"
_STEP: Final = "write {max_num_batched_tokens} N"
_KV: Final = "write {kv_cache_memory_bytes} SIZE, such as 8GB, or {num_kv_blocks} N"
_SHARE: Final = "write {gpu_memory_utilization} X, or on a CPU {kv_cache_memory_bytes} SIZE"
_KV_TYPE: Final = "write {kv_cache_dtype} auto or int8, which holds for K and V"
_CHOSEN: Final = "the kernels are chosen for the device; leave it out ({kernels} forces others)"
_ALWAYS: Final = "this is always on; leave it out"
_GPU_LAYERS: Final = "all layers run on one device; write {device} cuda or {device} cpu"
_NAME: Final = "write {served_model_name} NAME"
_DRAFTS: Final = 'write {speculative_config} with a JSON object, such as \'{{"method": "ngram"}}\''
_ADAPTERS: Final = "write {enable_lora} {lora_modules} NAME=PATH"
_FILES: Final = "config.json of the model says it; change it there"
_TLS: Final = "TLS ends at a reverse proxy in front of the server: docs/server.md"
_REQUEST: Final = "each request says this; give it to the request, not to the engine"

FOREIGN: Final[dict[str, tuple[str, str]]] = {
    # llama.cpp
    **dict.fromkeys(("--ctx-size", "-c"), ("llama.cpp", _LENGTH)),
    **dict.fromkeys(("-m", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), ("llama.cpp", _MODEL)),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), ("llama.cpp", _GPU_LAYERS)),
    **dict.fromkeys(("--main-gpu", "-mg"), ("llama.cpp", "write {device} cuda:N")),
    **dict.fromkeys(("--tensor-split", "-ts", "--split-mode", "-sm"), ("llama.cpp", _ONE_DEVICE)),
    **dict.fromkeys(("-t", "-tb", "--threads-batch"), ("llama.cpp", "write {threads} N")),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), ("llama.cpp", _STEP)),
    **dict.fromkeys(("-np", "--parallel"), ("llama.cpp", _ROWS)),
    **dict.fromkeys(("-cb", "--cont-batching"), ("llama.cpp", _ALWAYS)),
    **dict.fromkeys(("-nocb", "--no-cont-batching"), ("llama.cpp", "write {batching} static")),
    **dict.fromkeys(("-fa", "--flash-attn"), ("llama.cpp", _CHOSEN)),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), ("llama.cpp", _KV_TYPE)),
    **dict.fromkeys(
        ("--mlock", "--no-mmap", "--mmap", "--numa"),
        ("llama.cpp", "weights are read and repacked once for this processor; there is nothing to choose"),
    ),
    "--predict": ("llama.cpp", "write --max-tokens N, or max_tokens in a request"),
    "--n-predict": ("llama.cpp", "write --max-tokens N, or max_tokens in a request"),
    "--temp": ("llama.cpp", "write --temperature X, or temperature in a request"),
    "--repeat-penalty": ("llama.cpp", "write --repetition-penalty X, or repetition_penalty in a request"),
    "-p": ("llama.cpp", "write the prompt as a word: chairlift generate 'PROMPT'"),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), ("llama.cpp", "run chairlift chat")),
    **dict.fromkeys(("-sys", "--system-prompt"), ("llama.cpp", "write chairlift chat --system TEXT")),
    **dict.fromkeys(("-a", "--alias"), ("llama.cpp", _NAME)),
    "--jinja": ("llama.cpp", _ALWAYS),
    "--chat-template-file": ("llama.cpp", "write {chat_template} FILE"),
    **dict.fromkeys(("--embedding", "--embeddings"), ("llama.cpp", "write {runner} pooling")),
    **dict.fromkeys(("--reranking", "--rerank"), ("llama.cpp", "write {runner} pooling, and {reranker} for a decoder")),
    **dict.fromkeys(("--metrics", "--slots", "--props"), ("llama.cpp", "/metrics and /live are always there")),
    **dict.fromkeys(("-md", "--model-draft", "--draft", "--draft-max", "--draft-min"), ("llama.cpp", _DRAFTS)),
    **dict.fromkeys(("--lora", "--lora-scaled"), ("llama.cpp", _ADAPTERS)),
    **dict.fromkeys(("--grammar", "--json-schema", "-j"), ("llama.cpp", "give response_format in a request")),
    **dict.fromkeys(("--rope-scaling", "--rope-freq-base", "--rope-freq-scale", "--yarn-ext-factor"), ("", _FILES)),
    # vLLM, before speculative_config
    **dict.fromkeys(
        ("--speculative-model", "--num-speculative-tokens", "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min"),
        ("vLLM", _DRAFTS),
    ),
    # SGLang
    "--model-path": ("SGLang", _MODEL),
    **dict.fromkeys(("--tp", "--tp-size", "--pp-size", "--nnodes", "--node-rank"), ("SGLang", _ONE_DEVICE)),
    **dict.fromkeys(("--dp", "--dp-size"), ("SGLang", "write {replicas} N")),
    "--mem-fraction-static": ("SGLang", _SHARE),
    "--max-total-tokens": ("SGLang and TGI", f"{_KV} for SGLang's meaning; TGI's is {{max_model_len}} N"),
    "--context-length": ("SGLang", _LENGTH),
    "--max-running-requests": ("SGLang", _ROWS),
    "--max-queued-requests": ("SGLang", "write {max_num_queued_reqs} N"),
    **dict.fromkeys(("--chunked-prefill-size", "--max-prefill-tokens"), ("SGLang", _STEP)),
    "--schedule-policy": ("SGLang", "write {scheduling_policy} NAME"),
    "--schedule-conservativeness": ("SGLang", "write {admission_watermark} X, a share of the KV cache"),
    "--page-size": ("SGLang", "write {block_size} N"),
    **dict.fromkeys(("--attention-backend", "--sampling-backend", "--enable-torch-compile"), ("SGLang", _CHOSEN)),
    "--grammar-backend": ("SGLang", "every grammar is compiled by llguidance; leave it out"),
    "--disable-radix-cache": ("SGLang", "write {enable_prefix_caching} off: --no-enable-prefix-caching"),
    "--enable-mixed-chunk": ("SGLang", "write {prefill_mode} mixed, which is the default"),
    **dict.fromkeys(("--disable-cuda-graph", "--cuda-graph-max-bs"), ("SGLang", "write {cuda_graphs} off")),
    "--random-seed": ("SGLang", "write {seed} N"),
    "--lora-paths": ("SGLang", _ADAPTERS),
    "--max-loras-per-batch": ("SGLang", "write {max_loras} N"),
    **dict.fromkeys(
        ("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-draft-tokens"),
        ("SGLang", _DRAFTS),
    ),
    "--is-embedding": ("SGLang", "write {runner} pooling"),
    "--enable-metrics": ("SGLang", _ALWAYS),
    "--log-level": ("SGLang", "write --verbose for more, and {log_requests} for a line per request"),
    # TGI
    "--model-id": ("TGI", _MODEL),
    **dict.fromkeys(("--num-shard", "--sharded"), ("TGI", _ONE_DEVICE)),
    "--max-concurrent-requests": ("TGI", "write {max_num_queued_reqs} N"),
    **dict.fromkeys(
        ("--max-input-tokens", "--max-input-length"), ("TGI", f"{_LENGTH}, for prompt and answer together")
    ),
    "--max-batch-prefill-tokens": ("TGI", _STEP),
    "--max-batch-total-tokens": ("TGI", _KV),
    "--waiting-served-ratio": ("TGI", "write {prefill_mode} NAME"),
    "--max-waiting-tokens": ("TGI", "write {prefill_mode} NAME"),
    "--quantize": ("TGI", "write {quantization} int8, int4 or fp8"),
    "--cuda-memory-fraction": ("TGI", _SHARE),
    "--huggingface-hub-cache": ("TGI", "set HF_HOME to the directory of the Hub's cache"),
    "--hostname": ("TGI", "write {host} ADDRESS"),
    "--json-output": ("TGI", "write {log_format} json"),
    "--speculate": ("TGI", _DRAFTS),
    "--otlp-endpoint": ("TGI", "write {otlp_traces_endpoint} URL"),
    "--max-best-of": ("TGI", _REQUEST),
    # Ollama
    "--num-ctx": ("Ollama", _LENGTH),
    "--num-predict": ("Ollama", "write --max-tokens N, or max_tokens in a request"),
    "--num-gpu": ("Ollama", _GPU_LAYERS),
    "--num-parallel": ("Ollama", _ROWS),
    "--keepalive": ("Ollama", "the model stays in memory until the server ends"),
    "--keep-alive": ("Ollama", "the model stays in memory until the server ends"),
    "--modelfile": ("Ollama", "there are no Modelfiles; give the GGUF file, and settings with --config FILE"),
    # TensorRT-LLM
    "--max-batch-size": ("TensorRT-LLM and TGI", _ROWS),
    "--max-num-tokens": ("TensorRT-LLM", _STEP),
    "--max-seq-len": ("TensorRT-LLM", _LENGTH),
    "--max-beam-width": ("TensorRT-LLM", "there is no beam search; ask for n answers in a request"),
    "--kv-cache-free-gpu-memory-fraction": ("TensorRT-LLM", _SHARE),
    "--free-gpu-memory-fraction": ("TensorRT-LLM", _SHARE),
    "--extra-llm-api-options": ("TensorRT-LLM", "write --config FILE"),
    "--engine-dir": ("TensorRT-LLM", "there are no compiled engines; give the directory of the model"),
    # LightLLM
    "--model-dir": ("LightLLM", _MODEL),
    "--max-req-total-len": ("LightLLM", _LENGTH),
    "--max-total-token-num": ("LightLLM", _KV),
    "--batch-max-tokens": ("LightLLM", _STEP),
    "--running-max-req-size": ("LightLLM", _ROWS),
    "--mem-fraction": ("LightLLM", _SHARE),
    "--data-type": ("LightLLM", "write {dtype} NAME"),
    "--model-name": ("LightLLM", _NAME),
    # addresses of servers
    **dict.fromkeys(("--server-url", "--endpoint-url", "--api-base"), ("", "write --url URL")),
    # sockets
    **dict.fromkeys(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--ssl-cert-reqs"), ("vLLM", _TLS)),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), ("llama.cpp", _TLS)),
    "--uds": ("vLLM", "the server listens on TCP; for a Unix socket put a reverse proxy in front of it"),
    "--model": ("", _MODEL),
}
"""Flag -> (engine that has it; empty: several, what to write here)."""


def answer_to(flag: str, *, python: bool = False) -> str | None:
    """Sentence that says what to write instead of another engine's flag. None if the flag is unknown.

    ``python``: ``flag`` is the name of a keyword, and the answer names keywords.
    """
    word = "--" + flag.replace("_", "-") if python else flag
    if word not in FOREIGN:
        return None
    engine, instead = FOREIGN[word]
    shown = re.sub(r"(?<!{){(\w+)}(?: ([A-Z][A-Z:]*|[a-z]+:N))?", lambda found: _shown(found, python), instead)
    shown = shown.replace("{{", "{").replace("}}", "}")
    return f"{flag} is a flag of {engine}: {shown}" if engine else f"{flag} is not known here: {shown}"


def _shown(found: re.Match[str], python: bool) -> str:
    """A setting, and its value if there is one, as ``--max-model-len N`` or ``max_model_len=N``."""
    name = found[1]
    value = found[2]
    if python:
        return name if value is None else f"{name}={value}"
    return " ".join(filter(None, ["--" + name.replace("_", "-"), value]))
