"""``chairlift check``: tests whether a model runs on this machine, how many requests fit in memory, and whether its
outputs are right."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import chairlift
from chairlift.base.outputs import CompletionOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.flags import add_engine_flags, load_llm, read_settings
from chairlift.config import BUNDLED_MODEL
from chairlift.engine.info import describe_impl
from chairlift.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

    from chairlift.engine.info import PoolingInfo
    from chairlift.llm import LLM
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.hf_config import NetworkConfig

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "test a model directory and show how many requests fit into memory"
DESCRIPTION: Final = """Load a model as the engine would, show its size and the memory plan, and test it.

The test checks that all weights are finite, and that a few prompts get the same greedy tokens alone and in a batch.
Then the command measures the model's speed. Exit code 0: the model passed. Exit code 2: it did not."""

_PROMPTS: Final = ("The", "What is continuous batching?", "1, 2, 3, 4,", "Once upon a time there was a chairlift that")
_NUM_TOKENS: Final = 8
_PROMPT: Final = 128
"""Length in tokens of the prompts that measure prefill speed."""
_TOGETHER: Final = 8
_TIES: Final = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1, "fp8": 1.0}
"""dtype -> difference of log-probabilities up to which two tokens count as equally likely. Rounding depends on the
shape of the batch, so such tokens may swap ranks. With fp8 weights, large batches also round the activations to fp8."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift check``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    parser.add_argument(
        "--compare", choices=["transformers"], help="also load the model in transformers, and compare random texts"
    )
    add_engine_flags(parser, leave_out={"model", "seed"})


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 if the model passes. Raises ChairliftError if it fails."""
    settings, _ = read_settings(args, sampling=False)
    name = settings.get("model", BUNDLED_MODEL) if args.model is None else args.model
    from chairlift.executor.local import LocalExecutor
    from chairlift.models.loader import resolve_dtype, resolve_model_dir
    from chairlift.models.model_files import read_network  # takes torch along

    bundled = Path(chairlift.__file__).parent / "assets"
    model_dir = bundled if name == BUNDLED_MODEL else resolve_model_dir(name, settings.get("revision"))
    settings["model"] = str(model_dir)
    llm = load_llm(settings, quiet=False)
    _print_fact("model", name)
    if llm.info.pooling is not None:
        return _check_pooling(llm, llm.info.pooling, model_dir, args.compare is not None)
    network = read_network(model_dir, settings.get("model_impl", "auto"), settings.get("mmproj", "auto"))
    dtype = _describe(llm, network)
    _check_weights(model_dir, network, resolve_dtype(network, llm.info.dtype))
    _print_fact("weights", "all numbers are finite")
    _print_fact("self-test", _self_test(llm, network.vocab_size, _TIES[dtype]))
    if args.compare is not None:
        from chairlift.cli.compare import compare_texts

        _print_fact("compare", compare_texts(llm, model_dir, dtype.replace("fp8", "bfloat16")))
    _print_fact("speed", _speed(llm, network.vocab_size))
    executor = llm.engine.core.executor
    if settings.get("kv_store") is not None:
        _print_fact("kv store", _check_store(llm))
    if isinstance(executor, LocalExecutor) and (graphs := executor.describe_graphs()):
        _print_fact("CUDA graphs", graphs)
    return 0


def _check_store(llm: LLM) -> str:
    """Read all blocks that the store has for this model. Returns a description. Raises ModelLoadError if the store
    could not be opened."""
    blocks = llm.engine.core.preparers.kv_blocks
    if (store := blocks.wait_for_store()) is None:
        raise ModelLoadError("kv_store could not be opened; the log says why")
    nbytes, damaged = store.verify()
    whole = "all are whole" if not damaged else f"{damaged:,} are damaged, and will be computed again"
    return f"{store.num_blocks:,} blocks of this model, {nbytes / 2**20:,.1f} MiB; {whole}"


def _check_pooling(llm: LLM, pooling: PoolingInfo, model_dir: Path, compare: bool) -> int:
    """Print the report for a model of embeddings, scores or classes. Returns the exit code. With ``compare``, the
    model is also compared with transformers."""
    from chairlift.loading.pooled import read_pooled
    from chairlift.models.loader import check_pooled_weights, resolve_dtype

    config = read_pooled(llm.config, model_dir)
    info = llm.info
    gives = f"embeddings of {pooling.width:,} numbers" if pooling.task == "embed" else f"classes {pooling.labels}"
    gives = gives if pooling.pair is None else f"scores of pairs, by the answers {' and '.join(pooling.labels)}"
    of_length = ", of length 1" if pooling.normalize else ""
    quantization = "" if info.quantization is None else f" with {info.quantization} weights"
    _print_fact("architecture", f"{config.network.model_type}, {config.network.num_hidden_layers} layers")
    _print_fact("gives", f"{gives}{of_length}, from {pooling.pooling_type}")
    _print_fact("weights", f"{info.weight_bytes / 2**20:,.0f} MiB, {info.dtype}{quantization}")
    _print_fact("rounds", _rounds(info.approximations, info.dtype))
    _print_fact("device", f"{info.device}, {info.kernels} kernels, {info.threads} threads")
    _print_fact("context", f"{info.max_model_len:,} tokens")
    _print_fact("memory", info.memory_plan)
    for note in llm.notes:
        _print_fact("note", note)
    check_pooled_weights(model_dir, config, resolve_dtype(config.network, info.dtype))
    _print_fact("weights", "all numbers are finite")
    _print_fact("self-test", _test_pooling(llm, pooling))
    if compare:
        from chairlift.cli.compare import compare_embeddings

        _print_fact("compare", compare_embeddings(llm, pooling, model_dir, info.dtype))
    length = min(_PROMPT, llm.max_model_len)
    texts = _some_tokens(info.vocab_size, _TOGETHER, length)
    seconds = _seconds(lambda: llm.embed(texts) if pooling.task == "embed" else llm.classify(texts))
    _print_fact(
        "speed", f"{_TOGETHER} texts of {length} tokens: {_TOGETHER * length / seconds:,.0f} tokens/s, measured now"
    )
    return 0


def _test_pooling(llm: LLM, pooling: PoolingInfo) -> str:
    """Compute the vector of each text separately, and again in one batch of all texts. Returns a description. Raises
    ModelLoadError if the two results differ by more than rounding allows."""
    highest = llm.info.vocab_size - 1
    ids = [[min(ord(char), highest) for char in text][: llm.max_model_len] for text in _PROMPTS]

    def vectors(texts: list[list[int]]) -> list[list[float]]:
        if pooling.task == "embed":
            return [each.outputs.embedding for each in llm.embed(texts)]
        return [each.outputs.probs for each in llm.classify(texts)]

    alone = [vectors([each])[0] for each in ids]
    together = vectors(list(ids))
    largest = max(abs(x) for vector in alone for x in vector)
    apart = max(abs(x - y) for one, other in zip(alone, together, strict=True) for x, y in zip(one, other, strict=True))
    if apart > _TIES[llm.info.dtype] * max(largest, 1e-6):
        raise ModelLoadError(
            f"self-test: vectors differ by {apart:g} between texts alone and in a batch, which is more than rounding;"
            " the weights or a kernel are broken, please report it"
        )
    how = "the same bits" if apart == 0 else f"the same vectors, but for {apart:.1g},"
    return f"{len(ids)} texts give {how} alone and in a batch"


def _check_weights(model_dir: Path, network: NetworkConfig | TransformersConfig, dtype: torch.dtype) -> None:
    """Raise ModelLoadError if a stored weight is not finite, or is not finite after conversion to ``dtype``."""
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.loader import check_weights

    if isinstance(network, TransformersConfig):
        from chairlift.models.fallback.loading import check_stored_weights

        check_stored_weights(model_dir, dtype)
    else:
        check_weights(model_dir, network, dtype)


def _print_fact(label: str, value: str) -> None:
    print(f"{label:14} {value}", flush=True)


def _rounds(approximations: Sequence[str], dtype: str) -> str:
    """Text about what is approximated."""
    return "; ".join(approximations) or f"nothing beyond arithmetic in {dtype}"


def _count(llm: LLM, network: NetworkConfig | TransformersConfig) -> tuple[int, int, int]:
    """Returns (number of parameters, KV bytes per token in the model's dtype, KV bytes per token in the cache's
    dtype)."""
    import torch

    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.context import LayerCache
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.loader import resolve_dtype

    if isinstance(network, TransformersConfig):
        from chairlift.models.fallback.loading import count_parameters

        executor = llm.engine.core.executor
        cached = sum(executor.block_bytes) // executor.block_size
        return count_parameters(network), cached, cached
    with torch.device("meta"):  # shapes only
        model = CausalLM(network)
    model.tie_weights()
    dtype = resolve_dtype(network, llm.info.dtype)
    kept_as = llm.config.cache.kv_cache_dtype
    kept_dtype = dtype if kept_as == "auto" else getattr(torch, kept_as)
    caches = [layer for layer in model.kv_cache_spec() if isinstance(layer, LayerCache)]  # other layers keep states
    sizes = [sum(layer.token_bytes(each) for layer in caches) for each in (dtype, kept_dtype)]
    return sum(parameter.numel() for parameter in model.parameters()), sizes[0], sizes[1]


def _describe(llm: LLM, network: NetworkConfig | TransformersConfig) -> str:
    """Print a description of the model and how many requests fit. Returns the name of the least precise dtype in
    use."""
    import torch

    from chairlift.executor.local import LocalExecutor
    from chairlift.loading.model import device_name
    from chairlift.loading.native_path import native_path
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.loader import resolve_dtype

    parameters, plain, cached = _count(llm, network)
    dtype = resolve_dtype(network, llm.info.dtype)
    name = str(dtype).removeprefix("torch.")
    kv_name = llm.config.cache.kv_cache_dtype.replace("auto", name)
    instead = f" instead of {plain:,} in {name}" if cached != plain else ""
    tokenizer = llm.tokenizer
    template = "no"
    if tokenizer is not None and tokenizer.chat_template is not None:
        llm.encode_chat([{"role": "user", "content": "Hi"}])  # finds a broken chat template before users do
        template = "yes"
    _print_fact(
        "architecture", f"{network.model_type}, {network.num_hidden_layers} layers, vocabulary {network.vocab_size:,}"
    )
    if not isinstance(network, TransformersConfig) and (experts := network.experts) is not None:
        shared = ", and one that all tokens pass" if experts.shared_size else ""
        where = f", in {sum(experts.layers)} of {network.num_hidden_layers} layers" if not all(experts.layers) else ""
        _print_fact("experts", f"{experts.routing.words}{shared}{where}")
    quantization = llm.info.quantization
    kind = f"{name}, those of the layers in {quantization}" if quantization else name
    _print_fact("parameters", f"{parameters:,} in {kind} ({llm.info.weight_bytes / 2**20:,.0f} MiB)")
    _print_fact("rounds", _rounds(llm.info.approximations, name))
    _print_fact("device", device_name(torch.device(llm.config.model.device)))
    _print_fact("layers", describe_impl(llm.info.model_impl))
    if isinstance(network, TransformersConfig):
        _print_fact("kernels", f"PyTorch, {name}, {llm.info.threads} threads")
    else:
        _print_fact("kernels", native_path(llm.config, llm.info, network).describe())
        for label, line in _coverage(network):
            _print_fact(label, line)
    _print_fact("context", f"{llm.max_model_len:,} tokens")
    _print_fact("chat template", template)
    _print_fact("KV per token", f"{cached:,} bytes in {kv_name}{instead}")
    _print_fact("memory", llm.memory_plan)
    executor = llm.engine.core.executor
    for rank, words in enumerate(executor.describe_processes() if isinstance(executor, LocalExecutor) else ()):
        _print_fact(f"process {rank}", words)
    for note in llm.notes:
        _print_fact("note", note)
    return "fp8" if quantization == "fp8" else name


def _coverage(network: NetworkConfig) -> Iterator[tuple[str, str]]:
    """(label, line) of each group of operations of this model, of formats of weights, and of kinds of adapters, that
    the same kernels compute."""
    from chairlift.executor.coverage import adapter_rows, rows_of_model, weight_rows

    tables = ("operations", rows_of_model(network)), ("formats", weight_rows()), ("adapters", adapter_rows())
    for label, rows in tables:
        groups: dict[tuple[str, str], list[str]] = {}
        for name, cpu, gpu, *_ in rows:
            groups.setdefault((cpu, gpu), []).append(name.replace("`", ""))
        for (cpu, gpu), names in groups.items():
            yield label, f"CPU: {cpu}; GPU: {gpu}: {', '.join(names)}"


def _self_test(llm: LLM, vocab_size: int, tie: float) -> str:
    """Generate greedy tokens for each prompt separately, and again in one batch of all prompts. Returns a description.
    Raises ModelLoadError if the tokens differ, unless the differing tokens are equally likely."""
    tokenizer = llm.tokenizer
    prompts = [tokenizer.encode(text) if tokenizer else [ord(char) % vocab_size for char in text] for text in _PROMPTS]
    prompts = [prompt[: llm.max_model_len // 2] for prompt in prompts]
    length = min(_NUM_TOKENS, llm.max_model_len // 2)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=2)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    together = llm.generate(prompts, params)
    ties = 0
    for text, one, other in zip(_PROMPTS, alone, together, strict=True):
        if one.error or other.error:
            raise ModelLoadError(f"self-test: {text!r} ended with an error: {one.error or other.error}")
        place = _first_difference(one.outputs[0], other.outputs[0])
        if place is None:
            continue
        if not _is_tie(one.outputs[0], other.outputs[0], place, tie):
            raise ModelLoadError(
                f"self-test: the answer to {text!r} differs at token {place + 1} between running alone and in a batch, "
                "and it is no near tie; the weights or a kernel are broken, please report it"
            )
        ties += 1
    away = f", but for near ties in {ties}" if ties else ""
    return f"{len(prompts)} prompts give the same {length} greedy tokens alone and in a batch{away}"


def _speed(llm: LLM, vocab_size: int) -> str:
    """Measure the speed of prefill and decode. Returns a description."""
    length = min(_PROMPT, llm.max_model_len // 2)
    count = min(_NUM_TOKENS * 2, llm.max_model_len - length - 1)
    alone, *together = prompts = _some_tokens(vocab_size, _TOGETHER + 1, length)
    first = SamplingParams(temperature=0, max_tokens=1)
    found = [f"prompts {length / _seconds(lambda: llm.generate([alone], first)):,.0f} tokens/s"]
    for name, texts in (("one answer", prompts[:1]), (f"{_TOGETHER} together", together)):
        if count < 1:
            break
        params = SamplingParams(temperature=0, max_tokens=1 + count, ignore_eos=True)
        turned = [[*text[1:], text[0]] for text in texts]  # so that the prefix cache has none of it
        again = [[*text[2:], *text[:2]] for text in texts]
        begun = _seconds(functools.partial(llm.generate, again, first))
        written = _seconds(functools.partial(llm.generate, turned, params)) - begun
        found.append(f"{name} {count * len(texts) / max(written, 1e-6):,.0f} tokens/s")
    return f"{', '.join(found)}, measured now"


def _some_tokens(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Prompts of random tokens. No two prompts begin with the same token."""
    return [[(number * 7919 + place * 31 + 5) % vocab_size for place in range(length)] for number in range(count)]


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _first_difference(one: CompletionOutput, other: CompletionOutput) -> int | None:
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _is_tie(one: CompletionOutput, other: CompletionOutput, place: int, tie: float) -> bool:
    """Whether two different tokens at the index ``place`` have log-probabilities within ``tie`` of each other."""
    likely = one.logprobs[place] if one.logprobs else {}
    pair = [likely.get(answer.token_ids[place]) for answer in (one, other)]
    logprobs = [entry.logprob for entry in pair if entry is not None]
    return len(logprobs) == 2 and abs(logprobs[0] - logprobs[1]) < tie
