"""LLM: offline inference in one object. It has an engine; it is not one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits, Prompt
from chairlift.engine.interrupt import held_interrupt
from chairlift.errors import ConfigError, RequestError
from chairlift.outputs import RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.tokenizer.chat_template import ChatTemplate
from chairlift.tokenizer.tokenizer import Tokenizer

__all__ = ["LLM"]

Progress = Callable[[str, float], None]
"""Called with a label and the share done (0..1) while a model loads."""

ChatMessage = Mapping[str, Any]


class LLM:
    """Load a model and answer prompts with continuous batching.

    ``model`` is a directory or a Hugging Face Hub id; None is the small model that comes with the package. The fields
    of :class:`~chairlift.config.EngineConfig` are keywords (``max_num_seqs=64``); unknown ones are refused by name.

    Raises ConfigError for a bad setting, ModelLoadError for a bad model.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        self.config = EngineConfig.from_flat(settings)
        # torch takes most of a second to import: only now is it needed.
        from chairlift.models.hf_config import read_config
        from chairlift.models.loader import resolve_model_dir

        name = self.config.model.model
        model_dir = (
            Path(__file__).parent / "assets"
            if name == BUNDLED_MODEL
            else resolve_model_dir(name, self.config.model.revision)
        )
        network = read_config(model_dir)
        self.tokenizer: Tokenizer | None = None
        if not self.config.model.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_dir(self.config.model.tokenizer or model_dir)
        self.max_model_len = _max_model_len(self.config.model.max_model_len, network.max_model_len)
        eos = set(network.eos_token_ids) | set(self.tokenizer.eos_token_ids if self.tokenizer else ())
        limits = ModelLimits(network.vocab_size, self.max_model_len, tuple(sorted(eos)))
        self.engine, self.memory_plan = _build(self.config, model_dir, network, limits, self.tokenizer, progress)
        source = self.tokenizer
        self._template = ChatTemplate(source.chat_template, source.named_tokens) if source else ChatTemplate(None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts (text, lists of token ids, or vLLM's ``{"prompt_token_ids": ...}``), outputs in their order.

        ``sampling_params`` is one for all or one each. All prompts are checked before any is answered; the
        RequestError for a bad one names its place.
        """
        if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Set)):
            raise RequestError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}")
        if not isinstance(sampling_params, (SamplingParams, Sequence, type(None))):
            raise RequestError(
                f"sampling_params must be a SamplingParams or one per prompt, got {type(sampling_params).__name__}"
            )
        alone = isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts)
        listed: list[Any] = [prompts] if alone else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts but {len(params)} sampling parameters; give one for all or one each"
            )
        ids: list[str] = []
        try:
            for index, (prompt, param) in enumerate(zip(listed, params, strict=True)):
                try:
                    ids.append(self.engine.add_request(prompt, param, stream=False))
                except RequestError as error:
                    raise type(error)(f"prompt {index}: {error}") if len(listed) > 1 else error from None
            done = self._run(ids, use_tqdm)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. A conversation is a list of ``{"role": ..., "content": ...}``.

        Raises TemplateError when the model has no chat template, or it fails.
        """
        given: object = messages  # whatever the type says, text and single messages are what people send
        if not isinstance(given, (list, tuple)):
            raise RequestError(
                "a conversation must be a list of messages like {'role': 'user', 'content': 'Hi'}, got"
                f" {type(messages).__name__}"
            )
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts: list[Prompt] = [self.encode_chat(each, **template_variables) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, **template_variables: Any
    ) -> list[int]:
        """The token ids of a conversation, laid out by the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("chat needs the tokenizer, which was not loaded (skip_tokenizer_init); send token ids")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt, **template_variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _run(self, ids: Sequence[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        wanted = set(ids)
        done: dict[str, RequestOutput] = {}
        bar = None
        if use_tqdm:
            from tqdm import tqdm

            bar = tqdm(total=len(ids), unit="prompt")
        with held_interrupt() as interrupted:
            while len(done) < len(wanted):
                for output in self.engine.step():
                    if output.finished and output.request_id in wanted:
                        done[output.request_id] = output
                        if bar is not None:
                            bar.update()
                if interrupted():
                    raise KeyboardInterrupt
        if bar is not None:
            bar.close()
        return done


def _is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, (list, tuple)) and bool(prompts) and all(type(item) is int for item in prompts)


def _max_model_len(asked: int | None, trained: int) -> int:
    if asked is not None and asked > trained:
        raise ConfigError(f"max_model_len is {asked}, but the model was made for {trained} positions; lower it")
    return asked or trained


def _build(
    config: EngineConfig,
    model_dir: Path,
    network: Any,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> tuple[Engine, str]:
    """Load the weights, size the KV cache, and put the engine together."""
    import torch

    from chairlift.executor.kv_tensors import DEFAULT_SHARE, available_memory, plan_kv_cache
    from chairlift.executor.local import LocalExecutor
    from chairlift.executor.select import choose_isa, make_runner
    from chairlift.models.loader import WeightLayout, load_model, resolve_dtype

    device = torch.device(config.model.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {config.model.device!r}, but this torch finds no CUDA device; use device='cpu'")
    dtype = resolve_dtype(network, config.model.dtype)
    isa = choose_isa(config, network, dtype, device)
    layout = WeightLayout.ONEDNN if isa is None else WeightLayout.NATIVE
    model = load_model(model_dir, network, dtype, device, progress, layout=layout)
    scheduler = config.scheduler
    memory = config.cache.kv_cache_memory_bytes
    plan = plan_kv_cache(
        model.kv_cache_spec(),
        dtype=dtype,
        block_size=config.cache.block_size,
        memory_bytes=int(available_memory(device) * DEFAULT_SHARE) if memory is None else memory,
        num_blocks=config.cache.num_kv_blocks,
        most_tokens=scheduler.max_num_seqs * limits.max_model_len,
    )
    executor = LocalExecutor(
        make_runner(model, plan, config, dtype, device, isa),
        num_slots=scheduler.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=plan.block_size,
    )
    engine = Engine(
        executor,
        limits,
        scheduler,
        tokenizer=tokenizer,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        cache_secret=os.urandom(16),
        seed=config.model.seed,
    )
    return engine, plan.describe(limits.max_model_len)
