"""LLM: offline inference with one object."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.adapters import Adapters
from chairlift.engine.engine import Engine
from chairlift.engine.idle_settings import idle_settings
from chairlift.engine.input_processor import ModelLimits, Prompt
from chairlift.engine.interrupt import held_interrupt
from chairlift.engine.pooled.pooled_calls import PooledCall, PooledCalls, listed, one_or_more
from chairlift.engine.pooled.pooling_inputs import PoolingInputs
from chairlift.errors import ConfigError, EngineDeadError, RequestError, TemplateError
from chairlift.loading.kv_store import open_store
from chairlift.loading.model import Progress, load_executor, read_images, read_tokenizer
from chairlift.loading.pooled import is_pooling, load_pooling
from chairlift.models.vision.chats import prepare_images, take_images
from chairlift.models.vision.processor import PreparedImage
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.messages import normalize_messages
from chairlift.text.tokenizer.plain_text import PlainTextEncoder
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.text.tool_calls import (
    Answer,
    AnswerReader,
    Tools,
    check_tools,
    guarantees_calls,
    holds_calls,
    output_constraint,
    read_answer,
    reasoning_format_of,
    strict_calls_format,
    thinking_of,
    tool_format_of,
)

__all__ = ["LLM"]

ChatMessage = Mapping[str, Any]
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_PAUSED_SECONDS: Final = 0.05
"""Seconds between two looks at requests while generation is paused: they may be aborted, or the program interrupted."""


class LLM:
    """Load a model and answer prompts with continuous batching.

    ::

        llm = LLM("path-or-hub-id", max_num_seqs=64)
        print(llm.generate("Hi", SamplingParams(max_tokens=32))[0].outputs[0].text)

    ``model`` is a directory or a Hugging Face Hub id; None selects the small model that comes with the package. Each
    field of :class:`~chairlift.config.EngineConfig` is a keyword argument (``max_num_seqs=64``); an unknown keyword
    raises ConfigError. A setting that only vLLM has is accepted if it changes nothing; otherwise the error names
    Chairlift's setting for the same purpose.

    Raises ConfigError for a bad setting, ModelLoadError for a bad model.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        self.config = EngineConfig.from_flat(settings)
        self._turn = threading.Condition(threading.RLock())
        self._is_paused = False
        self._process = os.getpid()
        self._pooled: PooledCalls | None = None
        self._engine: Engine | None = None
        self._ended: dict[str, RequestOutput] = {}  # outputs that ended while another call was waiting
        if is_pooling(self.config):
            self._load_pooling(progress)
            return
        loaded = load_executor(self.config, progress)
        info = loaded.info
        self.tokenizer: Tokenizer | None = None
        if not self.config.model.skip_tokenizer_init:
            self.tokenizer = read_tokenizer(self.config, info.model_dir)
        self.max_model_len = info.max_model_len
        self.memory_plan = info.memory_plan
        eos = set(info.eos_token_ids) | set(self.tokenizer.eos_token_ids if self.tokenizer else ())
        reader = None if self.tokenizer is None else read_images(self.config, info.model_dir, self.tokenizer)
        self._images = reader if info.takes_images else None
        store = open_store(self.config, loaded.executor, info)
        self._engine = Engine(
            loaded.executor,
            ModelLimits(
                info.vocab_size,
                info.max_model_len,
                tuple(sorted(eos)),
                self.config.scheduler.promises,
                info.shortest_prompt,
            ),
            self.config.scheduler,
            tokenizer=self.tokenizer,
            cache=self.config.cache,
            cache_secret=os.urandom(16) if store is None else store.secret,
            kv_store=store,
            seed=self.config.model.seed,
            adapters=Adapters(loaded.adapters, self.config.lora.active),
            images=self._images,
        )
        weakref.finalize(self, self._engine.core.preparers.kv_blocks.shutdown)
        self.info = info = dataclasses.replace(info, capacity_tokens=self.engine.kv.capacity_tokens)
        """Facts about the loaded model and how it is served."""
        self._first_info = info
        self._approximations = loaded.approximations
        self._sampling_defaults = info.sampling_defaults
        self.notes: tuple[str, ...] = info.notes
        """Notes on how the model is served here, one per line. They are also logged as warnings."""
        problem = info.too_much_reserved(self.config.scheduler.promises)
        for each in [*idle_settings(self.config, info), *info.notes, *([problem] if problem else [])]:
            _log.warning("%s", each)
        source = self.tokenizer
        self._plain: PlainTextEncoder | None = None
        if source is not None and self.config.model.plain_text_messages:
            self._plain = PlainTextEncoder(source, source.chat_template)
        self._template = ChatTemplate(source.chat_template, source.named_tokens) if source else ChatTemplate(None)
        try:
            self._template.parse()
        except TemplateError as error:
            _log.warning("prompts work, but chats will be refused: %s", error)

    def _load_pooling(self, progress: Progress | None) -> None:
        """Load a model for embeddings, scores or classes. Such a model needs no generating engine."""
        loaded = load_pooling(self.config, progress)
        self.info = loaded.info
        self.notes = loaded.info.notes
        self.max_model_len = self.info.max_model_len
        self.memory_plan = self.info.memory_plan
        self.tokenizer = None
        if not self.config.model.skip_tokenizer_init:
            self.tokenizer = read_tokenizer(self.config, self.info.model_dir)
        limits = ModelLimits(self.info.vocab_size, self.max_model_len, (), self.config.scheduler.promises)
        self._engine = Engine(loaded.executor, limits, loaded.scheduler)
        self._pooled = PooledCalls(PoolingInputs(self.info, self.tokenizer))
        for each in [*idle_settings(self.config, self.info), *self.notes]:
            _log.warning("%s", each)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeddings of the texts, in their order, as ``output.outputs.embedding``.

        Prompts are texts or lists of token ids. A prompt that is too long raises RequestError, unless
        ``truncate_prompt_tokens`` gives the number of its first tokens to keep (-1: as many as the model takes).
        ``dimensions`` shortens the embeddings of models that were trained for shortened embeddings. ``prompt_name``
        selects a prompt in the model's files to put before each text; None selects the model's default, if it has one.
        Raises RequestError for a bad prompt or argument, and for a model without embeddings.

        ::

            outputs = llm.embed(["a text", "another"])
            vector = outputs[0].outputs.embedding
        """
        pooled = self._pooling("embed")
        with self._turn:
            return self._pool(pooled.embed(one_or_more(prompts), truncate_prompt_tokens, dimensions, prompt_name))

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: str = "embed"
    ) -> list[PoolingRequestOutput[Any]]:
        """Call :meth:`embed` or :meth:`classify`, whichever ``pooling_task`` names (vLLM's interface).

        Raises RequestError for other tasks, and for a model that generates texts.
        """
        if pooling_task not in ("embed", "classify"):
            raise RequestError(
                f"pooling_task is {pooling_task!r:.40}, and may be 'embed' or 'classify'; score() scores pairs"
            )
        if self._pooled is None:
            raise RequestError(
                "encode makes embeddings or classes, and this model generates texts; for token ids call"
                " get_tokenizer().encode(text), for answers generate()"
            )
        return self.embed(prompts) if pooling_task == "embed" else self.classify(prompts)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with ``encode`` and ``decode``. Raises RequestError if the tokenizer was not
        loaded."""
        if self.tokenizer is None:
            raise RequestError("the tokenizer was not loaded; leave skip_tokenizer_init out")
        return self.tokenizer

    def beam_search(self, *_: Any, **__: Any) -> NoReturn:
        """Always raise RequestError: beam search, which vLLM has, is not offered. The message names the closest
        alternative."""
        raise RequestError(
            "there is no beam search; call generate with SamplingParams(n=4, logprobs=0), and keep the answer of the"
            " highest cumulative_logprob"
        )

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """One number per class for each text, as ``output.outputs.probs``, in the order of ``info.pooling.labels``.

        See :meth:`embed` for the prompts. Raises RequestError for a bad prompt, and for a model that is not a
        classifier.

        ::

            outputs = llm.classify(["What a nice day."])
            best = max(outputs[0].outputs.probs)
        """
        pooled = self._pooling("classify")
        with self._turn:
            return self._pool(pooled.classify(one_or_more(prompts), truncate_prompt_tokens))

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Relevance of each document to a query, as ``output.outputs.score``. Higher is better.

        ``query`` is one text for all documents, or one per document. An embedding model gives the cosine of the two
        embeddings, a cross encoder its own score of the pair. ``truncate_prompt_tokens`` shortens documents only.
        Raises RequestError for bad texts, and for a classifier with several classes.

        ::

            outputs = llm.score("capital of France", ["Paris is ...", "Bread is ..."])
            scores = [output.outputs.score for output in outputs]
        """
        pooled = self._pooling("score")
        with self._turn:
            return self._pool(pooled.score(listed(query), listed(documents), truncate_prompt_tokens))

    def _pooling(self, what: str) -> PooledCalls:
        self._check_process()
        if self._pooled is None:
            raise RequestError(
                f"{what} needs a model for embeddings, scores or classes, and {self.config.model.model!r:.100}"
                " generates texts; load another, or set runner to 'pooling' to embed with this one"
            )
        return self._pooled

    def _pool(self, call: PooledCall[_Result]) -> list[PoolingRequestOutput[_Result]]:
        """Compute the results of one call. Raises RequestError if a text yields no vector."""
        engine = self._running
        ids = [text.request_id for text in call.texts]
        try:
            for text in call.texts:
                engine.add_text(text)
            done = self._run(ids, False)
        finally:
            for request_id in ids:
                engine.abort(request_id)
        vectors: dict[str, bytes] = {}
        for index, request_id in enumerate(ids):
            if (vector := done[request_id].vector) is None:
                raise RequestError(f"prompt {index}: {done[request_id].error}")
            vectors[request_id] = vector
        return call.finish(vectors)

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests. Raises RequestError for a model of embeddings, scores or classes."""
        self._generates("this")
        return self._running

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("the engine was not started")
        return self._engine

    def _generates(self, what: str) -> None:
        if self._pooled is not None:
            raise RequestError(
                f"{what} needs a model that generates texts, and {self.config.model.model!r:.100} is one for"
                " embeddings, scores or classes: call embed, score or classify"
            )

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a call without ``sampling_params``: the values from the model's files, and Chairlift's defaults
        otherwise."""
        return SamplingParams(**self._sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for prompts: texts, lists of token ids, or vLLM's ``{"prompt_token_ids": ...}``. Outputs have
        the order of the prompts.

        ``sampling_params``, ``priority``, ``tenant`` and ``lora_request`` are one value for all prompts, or a list with
        one per prompt. Without ``sampling_params``, :meth:`get_default_sampling_params` is used. ``priority`` overrides
        the priority in ``sampling_params``; ``tenant`` is the tenant that the policy charges for the tokens;
        ``lora_request`` is the adapter (None: the model itself). All prompts are checked before any token is computed;
        the RequestError for a bad prompt gives the prompt's index. Raises ModelLoadError for an adapter that cannot be
        read. Several threads may call this method; the calls run one after another.

        ::

            outputs = llm.generate(["Hi", "Bye"], SamplingParams(max_tokens=32))
            texts = [output.outputs[0].text for output in outputs]
        """
        self._generates("generate")
        listed = one_or_more(prompts)
        if not isinstance(sampling_params, (SamplingParams, Sequence, type(None))):
            raise RequestError(
                f"sampling_params must be a SamplingParams or one per prompt, got {type(sampling_params).__name__}"
            )
        count = len(listed)
        all_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling parameters", all_params, count)
        priorities = _one_each("priorities", priority, count)
        tenants = _one_each("tenants", tenant, count)
        adapters = _one_each("adapters", lora_request, count)
        ids: list[str] = []
        self._check_process()
        with self._turn:
            try:
                for index, (prompt, param, level) in enumerate(zip(listed, params, priorities, strict=True)):
                    try:
                        # The engine would read None as "not given", but each entry of a list must be given.
                        if param is None:
                            raise RequestError("sampling parameters must be a SamplingParams, got NoneType")
                        if level is not None and isinstance(param, SamplingParams):
                            param = dataclasses.replace(param, priority=level)
                        whose = {"tenant": tenants[index], "lora_request": adapters[index]}
                        ids.append(self.engine.add_request(prompt, param, stream=False, **whose))
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
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several conversations. A conversation is a list of ``{"role": ...,
        "content": ...}``.

        A content may be a list of parts: texts, and images if the model reads images. An image is ``{"type": "image",
        "image": ...}`` with a Pillow image, or ``{"type": "image_url", "image_url": {"url":
        "data:image/png;base64,..."}}``.

        ``tools`` are functions that the model may call, in OpenAI's form; :meth:`read_answers` finds the calls in the
        outputs. ``tool_choice`` ``"required"``, or the name of a function, forces calls: after its reasoning, the
        answer has only calls, and the arguments satisfy the functions' schemas. Otherwise the calls of functions with
        ``strict: True`` satisfy their schemas. ``parallel_tool_calls=False`` allows one call. The other arguments are
        those of :meth:`generate`, and variables for the chat template. Raises RequestError for tools that are not in
        OpenAI's form, for tools that the template does not print, and for calls that cannot be forced. Raises
        TemplateError when the model has no chat template or the template fails.

        ::

            outputs = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=32))
            print(outputs[0].outputs[0].text)
        """
        self._generates("chat")
        conversation: object = messages  # callers also send plain text and single messages, against the type
        if not isinstance(conversation, (list, tuple)):
            raise RequestError(
                "a conversation must be a list of messages like {'role': 'user', 'content': 'Hi'}, got"
                f" {type(messages).__name__}"
            )
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        checked = check_tools(tools, tool_choice, parallel_tool_calls)
        offered = checked.offered or None
        laid_out = [self._lay_out(each, tools=offered, **template_variables) for each in conversations]
        ids = [each for each, _ in laid_out]
        if checked.choice in ("required", "named") or checked.strict:
            sampling_params = self._held_to_calls(checked, ids, sampling_params)
        prompts: list[Prompt] = [
            {"prompt_token_ids": each, "multi_modal_data": {"image": images}} if images else each
            for each, images in laid_out
        ]
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request}
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **how)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter from memory by its number. A later request for the adapter reads the files again. Returns
        False for an unknown number."""
        self._check_process()
        self._generates("remove_lora")
        with self._turn:
            return self.engine.remove_lora(lora_int_id)

    def _held_to_calls(
        self,
        tools: Tools,
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        """Sampling parameters of each prompt, with a grammar that forces the tool calls, or that holds the calls of
        strict functions to their schemas."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("tools need the tokenizer, which was not loaded; leave skip_tokenizer_init out")
        form = tool_format_of(tokenizer.chat_template)
        reasoning = reasoning_format_of(tokenizer.chat_template)
        if form is None:
            raise RequestError("tools has functions, but no format of tool calls is known for the chat template")
        if tools.strict and strict_calls_format(form, tools) is None:
            raise RequestError(
                f"strict of {min(tools.strict)} cannot be kept in the format {form.name}; leave strict out, or use"
                " tool_choice 'required'"
            )
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        every = _one_each("sampling parameters", default, len(prompts))
        forced = []
        for prompt, params in zip(prompts, every, strict=True):
            if not isinstance(params, SamplingParams):
                raise RequestError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}")
            if params.structured_outputs is not None:
                what = "strict" if tools.strict else "tool_choice"
                raise RequestError(f"{what} and structured_outputs each hold the answer to a form; leave one out")
            tail = tokenizer.decode(prompt[-64:], False, final=False)
            whole = output_constraint(None, tools, form, reasoning, thinking_of(reasoning, tail))
            forced.append(dataclasses.replace(params, structured_outputs=whole))
        return forced

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted by the model's chat template. Each image becomes its marker token."""
        how = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return self._lay_out(messages, **how, **template_variables)[0]

    def _lay_out(self, messages: Sequence[ChatMessage], **how: Any) -> tuple[list[int], list[PreparedImage]]:
        """(token ids of a conversation with a marker for each image, the images)."""
        self._generates("chat")
        if self.tokenizer is None:
            raise RequestError("chat needs the tokenizer, which was not loaded (skip_tokenizer_init); send token ids")
        images: list[PreparedImage] = []
        if self._images is None:
            normalize_messages(messages)  # refuses images
        else:
            messages, given_images = take_images(messages)
            images = prepare_images(self._images, given_images)
        if self._plain is None:
            text = self._template.render(messages, **how)
            return self.tokenizer.encode(text, add_special_tokens=False), images
        return self._plain.encode(self._template.render_shielded(messages, self._plain.controls, **how)), images

    def read_answers(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Parse the answers of a chat: content, reasoning, and calls of the ``tools`` that the chat was given.

        With the ``tool_choice`` of the chat, a required call that ``max_tokens`` has cut is a call with ``is_cut``;
        without it, this call is content.

        The formats of calls and reasoning are those that the model's chat template prints. Raises RequestError for
        tools that are not in OpenAI's form, and when the template has no known format.
        """
        if self.tokenizer is None:
            raise RequestError("answers are read by the tokenizer, which was not loaded (skip_tokenizer_init)")
        checked = check_tools(tools, tool_choice)
        schemas = checked.schemas
        template = self.tokenizer.chat_template
        tokenizer = self.tokenizer
        form = tool_format_of(template) if schemas else None
        reasoning = reasoning_format_of(template)
        if schemas and form is None:
            raise RequestError("tools has functions, but no format of tool calls is known for the chat template")
        tail = tokenizer.decode(output.prompt_token_ids[-64:], False, final=False)
        inside = reasoning is not None and reasoning.is_open_after(tail)
        hidden = tuple(filter(None, tokenizer.special_texts.values()))
        how: dict[str, Any] = {"inside": inside, "hidden": hidden, "custom": checked.custom}
        how |= {"held": holds_calls(None, checked, form), "guaranteed": guarantees_calls(None, checked, form)}
        read = []
        for answer in output.outputs:
            reader = AnswerReader(form, reasoning, schemas, **how)
            read.append(read_answer(tokenizer.decode(answer.token_ids, False), reader))
        return read

    def update_weights(
        self, source: str | Path | Mapping[str, Any], version: int, *, in_flight: str = "continue"
    ) -> None:
        """Use other weights for the same network from the next step on. ``version`` numbers them; the first weights
        have 0.

        ``source`` is a directory with safetensors, or a mapping from Hugging Face's weight names to tensors of any
        float dtype on any device, or to ``GroupedRows`` matrices. ``source`` must have all weights of the model, with
        the same shapes. The weights are copied and rounded to the model's dtype. ``version`` must not be lower than the
        current version. ``CompletionOutput.weight_versions`` has the version of each token.

        The prefix cache does not reuse keys and values of older weights. ``in_flight`` selects what running requests
        do. With ``"continue"`` a running request keeps its keys and values until it is preempted (PipelineRL; Piche et
        al., 2025). This costs nothing, but its later tokens differ slightly from those of the new weights alone. With
        ``"recompute"`` a running request first computes its keys and values again; it keeps its tokens (AReaL; Fu et
        al., 2025).

        Raises ModelLoadError with the name of the tensor when the weights do not fit or are not finite, and ConfigError
        for a bad argument; after both the model is unchanged. Raises EngineDeadError when reading a file failed half
        way.
        """
        self._check_process()
        self._generates("update_weights")
        with self._turn:
            self.engine.update_weights(source, version, in_flight=in_flight)
            path = str(source) if isinstance(source, (str, Path)) else ""
            self.info = self._first_info.updated(path, version, self._approximations())

    def pause_generation(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Compute no further step until :meth:`resume_generation`; returns when no step is running.

        For programs with several threads: a call of :meth:`generate` in another thread waits and later goes on with the
        same tokens, or with ``abort`` returns the tokens that it has. :meth:`update_weights` works meanwhile. Raises
        ConfigError for another mode.
        """
        self._check_process()
        if mode not in ("keep", "abort"):
            raise ConfigError(f"a pause may keep or abort the requests, got {mode!r:.40}; give one of keep, abort")
        self._is_paused = True  # before the turn: a running call sees it after its step, and lends the turn
        with self._turn:
            self._running.land()
            self._running.core.is_paused = True
            if mode == "abort":
                self.abort_all()

    def resume_generation(self) -> None:
        """Go on after :meth:`pause_generation`; does nothing without a pause."""
        with self._turn:
            self._is_paused = self._running.core.is_paused = False
            self._turn.notify_all()

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._is_paused

    def abort_all(self) -> int:
        """End all requests with the finish reason ABORT and the tokens that they have. Returns their number."""
        self._check_process()
        with self._turn:
            return self._running.abort_all()

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Let no later request share KV that was computed until now. Running requests keep theirs; with ``recompute``
        they compute it again. :meth:`update_weights` needs no reset. Raises ConfigError for ``recompute`` in a static
        batch."""
        self._check_process()
        with self._turn:
            self._running.reset_prefix_cache(recompute=recompute)

    def _check_process(self) -> None:
        """Raise EngineDeadError in a forked process. A fork copies no threads: the child would wait for ever for the
        kernels' threads, or for the thread that held the lock."""
        if os.getpid() != self._process:
            raise EngineDeadError(
                f"this LLM belongs to process {self._process}, and its threads are not in process {os.getpid()}, which"
                " was forked from it; make an LLM in each process, or start processes by spawn"
            )

    def step_for(self, request_ids: Container[str]) -> list[RequestOutput]:
        """Compute one step. Returns the outputs of requests in ``request_ids`` that have ended; other outputs wait
        for a later call. While generation is paused, it waits a moment instead, and other threads may use the LLM.

        This method serves requests that were added to ``engine`` directly; they may end during a call of
        :meth:`generate`.
        """
        with self._turn:
            self._ended.update((output.request_id, output) for output in self._running.step() if output.finished)
            found = [self._ended.pop(each) for each in list(self._ended) if each in request_ids]
            if self._is_paused and not found:
                self._turn.wait(_PAUSED_SECONDS)
            return found

    def _run(self, ids: Sequence[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        unfinished = set(ids)
        done: dict[str, RequestOutput] = {}
        bar = None
        if use_tqdm:
            from tqdm import tqdm

            bar = tqdm(total=len(ids), unit="prompt")
        with held_interrupt() as interrupted:
            while len(done) < len(unfinished):
                for output in self.step_for(unfinished):
                    done[output.request_id] = output
                    if bar is not None:
                        bar.update()
                if interrupted():
                    raise KeyboardInterrupt
        if bar is not None:
            bar.close()
        return done


def _one_each(what: str, values: Any, count: int) -> list[Any]:
    """A list with one value per prompt. ``values`` is one value for all prompts, or a list with one value per
    prompt."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{count} prompts but {len(values)} {what}; give one for all or one each")
    return list(values)
