"""The engine in the caller's process: takes requests and returns text, one step at a time."""

from __future__ import annotations

import logging
import uuid

from chairlift.base.cache_hints import NO_HINTS, CacheHints
from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import FinishReason, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import CacheConfig, SchedulerConfig
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.adapter_names import AdapterEntry, AdapterNames
from chairlift.engine.adapters import Adapters
from chairlift.engine.clock import Clock
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.grammars import Grammars
from chairlift.engine.input_processor import InputProcessor, ModelLimits, PooledText, PreparedRequest, Prompt
from chairlift.engine.kv_blocks import StoreSource
from chairlift.engine.mask_limits import MaskLedger, MaskLimits
from chairlift.engine.output_processor import OutputProcessor, RequestState
from chairlift.engine.preparers import Preparers
from chairlift.engine.step_log import StepLog
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from chairlift.executor.executor import Executor, WeightSource
from chairlift.models.vision.processor import ImageProcessor
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


class Engine:
    """A core with checks of the input and conversion of the output to text. Not thread-safe: only one thread may use
    it."""

    def __init__(
        self,
        executor: Executor,
        limits: ModelLimits,
        config: SchedulerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        cache: CacheConfig | None = None,
        cache_secret: bytes = b"",
        seed: int | None = None,
        clock: Clock | None = None,
        policy: Policy | None = None,
        kv: KVCacheManager | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        images: ImageProcessor | None = None,
        kv_store: StoreSource | None = None,
    ) -> None:
        if grammars is None:
            compiler = GrammarCompiler(lambda: tokenizer, limits.vocab_size, limits.eos_token_ids)
            ledger = MaskLedger(MaskLimits.of(config))
            grammars = Grammars(compiler if tokenizer else None, ledger=ledger, vocab_size=limits.vocab_size)
        self.core = EngineCore(
            executor,
            config,
            max_model_len=limits.max_model_len,
            cache=cache,
            cache_secret=cache_secret,
            clock=clock,
            policy=policy,
            kv=kv,
            preparers=Preparers(grammars, adapters, kv_store),
        )
        self._adapters = AdapterNames()
        self.clock: Clock = self.core.clock
        self._inputs = InputProcessor(limits, tokenizer, self.core.kv, seed, images)
        self._outputs = OutputProcessor(tokenizer, limits.eos_token_ids)
        self._ready: list[RequestOutput] = []
        self._dead = False

    @property
    def limits(self) -> ModelLimits:
        """Limits of the model that requests must respect."""
        return self._inputs.limits

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def kv(self) -> KVCacheManager:
        return self.core.kv

    @property
    def step_log(self) -> StepLog:
        return self.core.step_log

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended, or any step is still in flight."""
        return bool(self._outputs) or bool(self.core.num_in_flight) or bool(self._ready)

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps whose tokens were not collected yet."""
        return self.core.num_in_flight

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
        cache_salt: str = "",
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        hints: CacheHints = NO_HINTS,
    ) -> str:
        """Queue a request and return its id. If the request cannot be served, raises RequestError and changes nothing.

        With ``stream``, :meth:`step` returns an output after every new token; otherwise only at the end. The adapter is
        read here at its first use; raises ModelLoadError if it cannot be read.
        """
        self._check_alive()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        undelivered = {output.request_id for output in self._ready}
        if isinstance(request_id, str) and (request_id in self._outputs or request_id in undelivered):
            raise RequestError(f"request id {request_id!r} is already in use; choose another")
        now = self.clock.now()
        params = SamplingParams() if params is None else params
        adapter_id = self._adapter_of(lora_request)
        who = cache_salt, tenant
        prepared = self._inputs.prepare(request_id, prompt, params, now, *who, adapter_id=adapter_id, hints=hints)
        if params.structured_outputs is not None:
            self.core.preparers.grammars.check(params.structured_outputs.value, cache_salt)
        self._add(prepared, stream)
        _log.debug("request %r: %d prompt tokens, seed %d", request_id, len(prepared.prompt_token_ids), prepared.seed)
        return request_id

    def add_text(self, text: PooledText) -> None:
        """Queue a text whose output is a vector. :meth:`step` returns one output for it, at its end."""
        self._check_alive()
        self._add(self._inputs.prepare_text(text, SamplingParams(), self.clock.now()), stream=False)

    def _add(self, prepared: PreparedRequest, stream: bool) -> None:
        try:
            self.core.add(prepared)
            self._outputs.add(prepared, stream)
        except RequestError:
            raise
        except Exception:  # out of memory, for example; this request ends, other requests continue
            self._ready += self._finish(self.core.abort(prepared.sequence_ids))
            raise
        except BaseException:  # Ctrl-C: the request is only partly added
            self._dead = True
            raise

    def _adapter_of(self, lora_request: LoRARequest | None) -> int:
        if lora_request is None:
            return 0
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {type(lora_request).__name__}")
        entry = self._adapters.find(lora_request)
        if entry is None:
            load = self._adapters.next_load(lora_request.lora_name, str(lora_request.lora_path))
            self.core.preparers.adapters.load_now(load)
            entry = AdapterEntry(load, lora_request.lora_int_id)
            self._adapters.add(entry)
        return entry.load.adapter_id

    def remove_lora(self, int_id: int) -> bool:
        """Remove an adapter by the number that its caller gave. Running requests keep the adapter, and the number may
        be used again. Returns False for an unknown number."""
        entry = self._adapters.with_int_id(int_id)
        if entry is None:
            return False
        self._adapters.remove(entry.name)
        self.core.preparers.adapters.unload(entry.load.adapter_id)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request in any state, at once and without an output. Returns False for a request that is unknown or
        whose last output was returned."""
        undelivered = [output for output in self._ready if output.request_id == request_id]
        self._ready = [output for output in self._ready if output.request_id != request_id]
        if request_id not in self._outputs:
            return bool(undelivered)
        for sequence_id in self._outputs.remove(request_id):
            # In a static batch, members that have ended and waited for this request leave together with it.
            self._ready += self._finish(self.core.abort([sequence_id]))
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of requests with new results. Sleeps until the next work is due.

        A request that fails raises nothing here; its output has the error. After any exception (Ctrl-C, a bug) the
        states of scheduler and executor may differ, so all later calls raise EngineDeadError.
        """
        self._check_alive()
        self._dead = True
        outputs = self._step()
        self._dead = False
        return outputs

    def land(self) -> None:
        """Wait for the steps in flight; the next :meth:`step` returns their tokens."""
        self._check_alive()
        self._dead = True
        while (step := self.core.land()) is not None:
            self._ready += self._take(step)
        self._dead = False

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Forget KV; see :meth:`chairlift.llm.LLM.reset_prefix_cache`. First waits for the steps in flight."""
        self.land()
        self.core.reset_prefix_cache(recompute=recompute)

    def abort_all(self) -> int:
        """End all requests with the finish reason ABORT; the next :meth:`step` returns their outputs. Returns their
        number."""
        self._check_alive()
        ids = self._outputs.ids()
        running = self._outputs.sequence_ids()
        finished = [FinishedSequence(name, FinishReason.ABORT) for name in running]
        self._ready += self._finish([*finished, *self.core.abort(running)])
        return len(ids)

    def update_weights(self, source: WeightSource, version: int, *, in_flight: str = "continue") -> None:
        """Use other weights from the next step on; see :meth:`chairlift.llm.LLM.update_weights`.

        First waits for the steps in flight; the next :meth:`step` returns their tokens.
        """
        self.land()
        self._dead = True
        try:
            self.core.update_weights(source, version, in_flight)
        except (ConfigError, ModelLoadError):  # the weights are unchanged
            self._dead = False
            raise
        self._outputs.weights_changed(version)
        self._dead = False

    def check_invariants(self) -> None:
        """Raise InvariantError if the scheduler's or the cache's data is inconsistent."""
        self.scheduler.check_invariants()

    def shutdown(self) -> None:
        """End all requests without outputs, and free the executor."""
        for request_id in self._outputs.ids():
            self._outputs.remove(request_id)
        self._ready.clear()
        self.core.shutdown()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError("the engine was interrupted inside a step and cannot go on; make a new one")

    def _step(self) -> list[RequestOutput]:
        ready = self._ready
        self._ready = []
        step = self.core.step()
        if step is not None:
            return ready + self._take(step)
        if not self.core.num_in_flight and not ready:
            when = self.core.next_event()
            if when is not None:
                self.clock.wait_until(when)
        return ready

    def _take(self, step: CoreOutputs) -> list[RequestOutput]:
        finished = list(step.finished)
        for sequence_id in self._outputs.take(step, self.clock.now()):
            finished += self.core.stop([sequence_id])
        outputs = self._finish(finished)
        if self.scheduler.membership.held:  # a static batch delivers no output before it ends
            return outputs
        reported = {output.request_id for output in outputs}
        growing = self._outputs.touched(step.sequence_ids)
        to_report = [state for state in growing if state.stream and state.request_id not in reported]
        return outputs + self._outputs_of(to_report)

    def _finish(self, finished: list[FinishedSequence]) -> list[RequestOutput]:
        states: list[RequestState] = self._outputs.finish(finished, self.clock.now())
        holds_batch = self.scheduler.membership.held  # a static batch delivers only complete answers
        return self._outputs_of([state for state in states if state.finished or (state.stream and not holds_batch)])

    def _outputs_of(self, states: list[RequestState]) -> list[RequestOutput]:
        """Outputs of these requests. A request whose output cannot be made ends with an error."""
        outputs: list[RequestOutput] = []
        for state in states:
            try:
                outputs.append(state.output())
            except Exception as error:
                self._outputs.break_off(state, error, self.clock.now())
        for state, sequence_ids in self._outputs.take_broken():
            outputs.append(state.output())
            outputs += self._finish(self.core.abort(sequence_ids))
        return outputs
