"""A fake engine for tests of the server: scripted tokens, real detokenizing, and every kind of failure.

An output depends only on the prompt, the seed, the index of the output and the sampling parameters, so
:meth:`FakeEngine.expected` can compute it. Deltas have random sizes, as when a client reads slowly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from chairlift.base.cache_hints import NO_HINTS, CacheHints
from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.service_class import DEFAULT_CLASS, ServiceClass
from chairlift.cli.commands import LIVE_COMPARISON
from chairlift.config import CacheConfig, ServerConfig
from chairlift.core.request import NO_PROMISE, Service
from chairlift.engine.async_engine import EngineState
from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.engine.events import Events
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift.engine.intake import Intake, Place
from chairlift.engine.kv_store.report import StoreReport
from chairlift.engine.served_adapters import ServedAdapters
from chairlift.errors import (
    ConfigError,
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    ReplicaStartError,
    RequestError,
)
from chairlift.metrics.stats import AutoscalingStats, ReplicaCounts, ReplicaStats, RequestStats
from chairlift.server.http.auth import load_keys
from chairlift.server.http.state import ServerState
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["EOS", "INFO", "MODEL", "FakeEngine", "FakeReplicas", "FakeStream", "byte_tokenizer", "make_state"]

MODEL = "fake"
EOS = 257
_WORDS = ("ride", " the", " lift", "é", " 😀", " snow", "\n", " top", "<>&\u2028", ' "quoted"', " über", "\x00")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

INFO = EngineInfo(
    model=MODEL,
    model_dir="",
    vocab_size=258,
    max_model_len=2048,
    eos_token_ids=(EOS,),
    capacity_tokens=4096,
    pool_tokens=4096,
    block_size=16,
    num_blocks=256,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    dtype="float32",
    device="cpu",
    kernels="hashlm",
    threads=1,
    memory_plan="4,096 tokens of KV cache",
    held=False,
    deterministic=True,
    fingerprint="fp_0123456789",
)


@functools.cache
def byte_tokenizer(begins: bool = False) -> Tokenizer:
    """Tokenizer with 256 bytes, ``<|im_start|>`` (256; with ``begins``, every text begins with it) and ``<|im_end|>``
    (257, end of sequence)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if begins:
        first = ("<|im_start|>", 256)
        backend.post_processor = processors.TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, _TEMPLATE)


class FakeStream:
    """Yields scripted outputs. If the engine fails before the outputs have ended, the stream raises the engine's
    failure."""

    def __init__(
        self,
        engine: FakeEngine,
        prompt: list[int],
        outputs: Sequence[RequestOutput],
        service: Service = NO_PROMISE,
        name: str = "",
    ) -> None:
        self.service_class, self.tenant, self.name = service.service_class, service.tenant, name
        self.leases = service.leases
        self.request_id = uuid.uuid4().hex
        self.prompt_token_ids = prompt
        self.aborted = False
        self._engine = engine
        self._outputs = list(outputs)
        self._given = 0

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        engine = self._engine
        await asyncio.sleep(0)
        if engine.gate is not None and self._given >= engine.gate_after:
            engine.waiting.set()
            await engine.gate.wait()
        if self.aborted or self._given == len(self._outputs):
            engine.streams.discard(self)
            raise StopAsyncIteration
        if engine.failure_of_streams is not None and self._given >= engine.fail_after:
            engine.streams.discard(self)
            raise engine.failure_of_streams
        self._given += 1
        return self._outputs[self._given - 1]

    def abort(self) -> None:
        if self in self._engine.streams:
            self._engine.streams.discard(self)
            self._engine.num_aborted += 1
        self.aborted = True
        if self._engine.gate is not None:
            self._engine.gate.set()

    async def aclose(self) -> None:
        self.abort()


class FakePrompts:
    """Replaces Prompts in tests: it does all work at once."""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._engine = engine
        self.follows_grammars = False
        """Whether outputs follow grammars. If not, the script determines them."""
        self.num_beside = 0
        """Number of jobs that ran in another thread."""
        self.max_chars = 1 << 30
        """Number of characters above which the text of a chat is refused before it is encoded."""
        self.encoded_at: list[float] = []
        self.words_asked: list[tuple[str, ...]] = []
        """Bad words in each call that tokenizes them."""
        self.template_gate: asyncio.Event | None = None
        """Event for which chats wait before their template is rendered."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
        self.encoded_at.append(time.monotonic())
        return self.tokenizer.encode(text, add_special_tokens)

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [await self.encode(text, add_special_tokens) for text in texts]

    async def check_grammar(self, params: SamplingParams, cache_salt: str = "") -> None:
        if params.structured_outputs is not None and not self.follows_grammars:
            raise RequestError("structured_outputs cannot be followed: this engine's answers are scripted")

    async def encode_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        self.words_asked.append(tuple(params.bad_words or ()))
        return ()

    async def encode_prediction(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params.prediction, str):
            return params
        return dataclasses.replace(params, prediction=await self.encode(params.prediction, False))

    async def beside(self, work: Callable[[], Any]) -> Any:
        if self._engine.full:
            raise QueueFullError("256 long texts wait already, as many as may; try again later")
        self.num_beside += 1
        return work()

    @property
    def chat_template(self) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.chat_template

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("chat needs the tokenizer, which was not loaded; send token ids")
        if self.template_gate is not None:
            self._engine.waiting.set()
            await self.template_gate.wait()
        template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer.named_tokens)
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_variables,
        )
        if len(text) > self.max_chars:
            raise PromptTooLongError(f"the text has {len(text):,} characters, more than the model takes")
        return self.tokenizer.encode(text, False)

    async def lay_out_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> tuple[list[int], None]:
        return await self.encode_chat(messages, **how), None


class FakeReplicas:
    """Replaces ServedReplicas in tests. The engine has the given replicas."""

    def __init__(self) -> None:
        self.engine_pid: int | None = None
        self.known: list[ReplicaStats] = []
        self.scaling: AutoscalingStats | None = None
        self.patience: list[float] = []
        """Argument of each restart."""
        self.refusal: ConfigError | ReplicaStartError | None = None
        """Error of a restart; None: it succeeds."""

    def shown(self) -> list[ReplicaStats]:
        return self.known

    def counts(self) -> dict[int, ReplicaCounts]:
        return {}

    def autoscaling(self) -> AutoscalingStats | None:
        return self.scaling

    async def restart(self, patience: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.patience.append(patience)


class FakeEngine:
    """Replaces AsyncEngine in tests. ``with_tokenizer=False`` corresponds to skip_tokenizer_init."""

    def __init__(self, *, with_tokenizer: bool = True, state: EngineState = EngineState.READY) -> None:
        self.state = state
        self.failure = ""
        self.adapters = ServedAdapters(lambda: None, lambda: None, enabled=False)
        self.adapters_asked: list[str] = []
        """Name of the adapter of each submitted request, in order; empty for a request without an adapter."""
        self.info: EngineInfo | None = INFO if state is EngineState.READY else None
        self.prompts = FakePrompts(self, byte_tokenizer() if with_tokenizer else None)
        self.stats = RequestStats()
        self.streams: set[FakeStream] = set()
        self.num_aborted = 0
        self.num_queued = 0
        self.cache = CacheConfig()
        self.num_cached: int | None = None
        """Prompt tokens that are read from the cache; None: all whole blocks."""
        self.replicas = FakeReplicas()
        self.max_queued_requests, self.max_queued_tokens = 256, 65_536
        self.submitted: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.service_classes: Mapping[str, ServiceClass] | None = None
        self.services: list[Service] = []
        """Class, tenant and deadlines of each submitted request, in order."""
        self.arrivals: list[float | None] = []
        self.names: list[str] = []
        self.room_asked: list[tuple[int, str]] = []
        self.tokens_asked: list[int] = []
        """Number of prompt tokens in each call that checks whether a prompt has room."""
        self.full = False
        """Whether every request is refused as if the queue were full."""
        self.failure_of_streams: Exception | None = None
        """Error that streams raise after ``fail_after`` outputs."""
        self.fail_after = 0
        self.failed_row = ""
        """Error with which every output ends after its first tokens; empty for none."""
        self.failed_reason = FinishReason.ERROR
        self.script: list[int] = []
        """Tokens of every output; empty for random tokens."""
        self.says_whole_script = False
        """Whether an output without ``max_tokens`` has the whole script. If not, it ends at a random place."""
        self.gate: asyncio.Event | None = None
        """Event for which streams wait after ``gate_after`` outputs."""
        self.gate_after = 0
        self.waiting = asyncio.Event()
        self.intake = Intake(256, 65_536)
        """Queue that tests can fill. Requests of the fake engine do not enter it."""
        self.waits: dict[str, float | None] = {}
        """Service class -> expected wait in seconds; 0 for classes that are not listed."""
        self.queued: list[tuple[FakeStream, Place]] = []
        self.events = Events("began", "ended", "steps")
        self.pauses: list[tuple[str, list[str]]] = []
        """(id of a request, names of the tools that its output calls), in order."""

    def paused(self, request_id: str, tools: Sequence[str]) -> None:
        self.pauses.append((request_id, list(tools)))

    @property
    def num_requests(self) -> int:
        return len(self.streams)

    def check_health(self) -> str:
        return "" if self.state is EngineState.READY else f"the engine is {self.state}"

    def retry_after(self) -> float:
        return 3.0

    def expected_wait(self, service_class: str = DEFAULT_CLASS, tenant: str = "") -> float | None:
        return self.waits.get(service_class, 0.0)

    def line(self) -> list[tuple[FakeStream, Place]]:
        return self.queued

    def requests(self) -> list[FakeStream]:
        return []  # a script knows nothing of their listed state

    def named(self, name: str) -> list[FakeStream]:
        return [stream for stream in self.streams if stream.name == name]

    def check_room(
        self, num_requests: int = 1, service_class: str = DEFAULT_CLASS, num_tokens: int = 0, tenant: str = ""
    ) -> None:
        self.room_asked.append((num_requests, service_class))
        self.tokens_asked.append(num_tokens)
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state}")
        if self.full:
            raise QueueFullError("256 requests wait already, and 256 may; try again later", 3.0)

    async def kv_store(self, clear: str = "") -> list[StoreReport]:
        return [StoreReport(state="off")]

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        kind: OutputKind = OutputKind.DELTA,
        cache_salt: str = "",
        tenant: str = "",
        queue_timeout: float | None = None,
        timeout: float | None = None,
        name: str = "",
        arrival: float | None = None,
        has_room: bool = False,
        bad_word_ids: tuple[tuple[int, ...], ...] | None = None,
        adapter: str = "",
        images: None = None,
        hints: CacheHints = NO_HINTS,
    ) -> FakeStream:
        self.adapters_asked.append(adapter)
        self.arrivals.append(arrival)
        self.check_room()
        self._check(prompt, params)
        limits = ModelLimits(INFO.vocab_size, INFO.max_model_len, (), self.service_classes)
        _, service = InputProcessor(limits, None, INFO)._service(params, 0.0, tenant)
        service = dataclasses.replace(service, session=hints.session, leases=hints.leases, payer=hints.payer)
        self.services.append(service)
        self.names.append(name)
        self.submitted.append((prompt, params, {"cache_salt": cache_salt, "queue_timeout": queue_timeout}))
        answers = [self._answer(prompt, params, index) for index in range(params.n)]
        if kind is OutputKind.FINAL:
            outputs = [self._output(prompt, params, [_cumulative(deltas) for deltas in answers], True)]
        else:
            outputs = self._interleaved(prompt, params, answers)
        stream = FakeStream(self, prompt, outputs, service, name)
        self.streams.add(stream)
        return stream

    def expected(self, prompt: list[int], params: SamplingParams) -> list[CompletionOutput]:
        """The complete outputs for a prompt."""
        return [_cumulative(self._answer(prompt, params, index)) for index in range(params.n)]

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty; send at least one character or one token id")
        ids = [0, *(params.stop_token_ids or ()), *(params.allowed_token_ids or ()), *(params.logit_bias or ())]
        info = self.info or INFO
        vocab_size = info.vocab_size
        if max(prompt) >= vocab_size:
            raise RequestError(f"the prompt has token id {max(prompt)}, which is not below {vocab_size}")
        if max(ids) >= vocab_size:
            raise RequestError(f"token id {max(ids)} is not below {vocab_size}")
        if len(prompt) + (1 if params.max_tokens is None else params.max_tokens) > info.max_model_len:
            raise PromptTooLongError(f"the prompt has {len(prompt)} tokens, and does not fit in {info.max_model_len}")

    def _answer(self, prompt: list[int], params: SamplingParams, index: int) -> list[CompletionOutput]:
        """Deltas of output number ``index``."""
        if params.max_tokens == 0:
            scored = None if params.logprobs is None else 0.0
            end = FinishReason.LENGTH
            return [CompletionOutput(index, "", [], scored, None if scored is None else [], end, None)]
        rng = random.Random(repr((prompt, params.seed, index)))
        most = params.max_tokens or (len(self.script) if self.says_whole_script else rng.randrange(1, 60))
        tokens = self._script(rng, most, params)
        tokenizer = self.prompts.tokenizer
        detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt, params)
        deltas: list[CompletionOutput] = []
        total, at = 0.0, 0
        while not deltas or deltas[-1].finish_reason is None:
            size = rng.choice((1, 1, 1, 2, 5))
            taken: list[int] = []
            stop: int | str | None = None
            reason: FinishReason | None = None
            while len(taken) < size and reason is None:
                token = tokens[at]
                at += 1
                taken.append(token)
                by_token = token in (params.stop_token_ids or ()) or (token == EOS and not params.ignore_eos)
                found = None if detokenizer is None else detokenizer.update([token], by_token)
                if by_token or found is not None:
                    reason, stop = FinishReason.STOP, found if found is not None else None if token == EOS else token
                elif at == most:
                    reason = FinishReason.LENGTH
            if self.failed_row and deltas:
                reason, stop = self.failed_reason, None
            text = "" if detokenizer is None else detokenizer.take_delta(reason is not None)
            logprobs = None
            if params.logprobs is not None:
                logprobs = [self._entry(token, params.logprobs) for token in taken]
                total += sum(entry[token].logprob for entry, token in zip(logprobs, taken, strict=True))
            deltas.append(CompletionOutput(index, text, taken, total if logprobs else None, logprobs, reason, stop))
        return deltas

    def _script(self, rng: random.Random, count: int, params: SamplingParams) -> list[int]:
        tokenizer = byte_tokenizer()
        tokens = list(self.script)
        while len(tokens) < count:
            tokens += [EOS] if rng.random() < 0.03 else tokenizer.encode(rng.choice(_WORDS))
        return tokens[:count]

    def _entry(self, token: int, top: int) -> dict[int, Logprob]:
        """Made-up log-probabilities of one position: the chosen token first, with a rank that depends on the token,
        then the ``top`` most likely tokens."""
        rank = token % 3 + 1
        likely = [(token + 17 * (r - rank)) % (self.info or INFO).vocab_size for r in range(1, max(top, rank) + 1)]
        entry = {token: self._logprob(token, rank)}
        for r, other in enumerate(likely[:top], start=1):
            entry.setdefault(other, self._logprob(other, r))
        return entry

    def _logprob(self, token: int, rank: int) -> Logprob:
        text = None if self.prompts.tokenizer is None else self.prompts.tokenizer.token_text(token)
        return Logprob(float("-inf") if token == 198 else -0.25 * rank, rank, text)

    def _output(
        self, prompt: list[int], params: SamplingParams, answers: list[CompletionOutput], finished: bool
    ) -> RequestOutput:
        scored: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scored = [None, *(self._entry(token, params.prompt_logprobs) for token in prompt[1:])]
        return RequestOutput(
            request_id="",
            prompt=None,
            prompt_token_ids=prompt,
            outputs=answers,
            finished=finished,
            num_cached_tokens=len(prompt) // 16 * 16 if self.num_cached is None else self.num_cached,
            prompt_logprobs=scored,
            error=self.failed_row or None,
        )

    def _interleaved(
        self, prompt: list[int], params: SamplingParams, answers: list[list[CompletionOutput]]
    ) -> list[RequestOutput]:
        """Request outputs in which one or several of the ``n`` answers have new tokens. ``answers`` has the deltas of
        each answer."""
        rng = random.Random(repr((prompt, params.seed)))
        left = [list(deltas) for deltas in answers]
        outputs = []
        while any(left):
            chosen = [deltas for deltas in left if deltas and rng.random() < 0.7]
            if chosen:
                news = [deltas.pop(0) for deltas in chosen]
                outputs.append(self._output(prompt, params, news, not any(left)))
        return outputs


def _cumulative(deltas: Sequence[CompletionOutput]) -> CompletionOutput:
    last = deltas[-1]
    return dataclasses.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
    )


def make_state(engine: FakeEngine | None = None, **settings: Any) -> ServerState:
    """Server state with a fake engine, for ``make_app``."""
    config = ServerConfig(**settings)
    fake: Any = engine or FakeEngine()
    return ServerState(
        config,
        fake,
        (MODEL, "other-name"),
        api_keys=load_keys(config),
        started_at=1_700_000_000,
        comparison=LIVE_COMPARISON,
    )
