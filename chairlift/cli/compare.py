"""Compares a loaded model with transformers, for ``chairlift check --compare transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.engine.info import PoolingInfo
    from chairlift.llm import LLM

__all__ = ["compare_embeddings", "compare_texts"]

_LENGTHS: Final = (3, 17, 40)
"""Lengths of the compared texts, in tokens."""
_MOST: Final = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""dtype -> maximum mean difference of log-probabilities, or of the numbers of vectors of length 1."""
_HINT: Final = "report it with the model's name and config.json"


def compare_texts(llm: LLM, model_dir: Path, dtype: str) -> str:
    """Compare the log-probabilities of the tokens of random texts with those of transformers' model, which is loaded in
    addition, in ``dtype``. Returns a description. Raises ModelLoadError if they differ by more than rounding, and
    ConfigError without transformers."""
    import torch

    theirs = _load(model_dir, dtype)
    texts = _texts(llm.info.vocab_size, llm.max_model_len - 1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    worst = 0.0
    for text, output in zip(texts, llm.generate(texts, params), strict=True):
        if output.error:
            raise ModelLoadError(f"compare: a text of {len(text)} tokens ended with an error: {output.error}")
        with torch.no_grad():
            expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float().log_softmax(-1)
        entries = (output.prompt_logprobs or [])[1:]
        found = torch.tensor([entry[token].logprob for entry, token in zip(entries, text[1:], strict=True) if entry])
        rows = torch.arange(len(text) - 1)
        worst = max(worst, float((found - expected[rows, torch.tensor(text[1:])]).abs().mean()))
    return _judged(worst, dtype, "log-probabilities")


def compare_embeddings(llm: LLM, pooling: PoolingInfo, model_dir: Path, dtype: str) -> str:
    """Compare embeddings of random texts with those of transformers' model and the same pooling; see
    :func:`compare_texts`. Raises ConfigError for classifiers and for linear layers after the pooling."""
    import torch

    theirs = _load(model_dir, dtype, "AutoModel")
    worst = 0.0
    texts = _texts(llm.info.vocab_size, llm.max_model_len)
    for text, output in zip(texts, llm.embed(texts), strict=True):
        with torch.no_grad():
            hidden = theirs(input_ids=torch.tensor([text])).last_hidden_state[0].float()
        if hidden.shape[1] != pooling.width or pooling.task != "embed":
            raise ConfigError("compare is for embeddings that are hidden states; leave it out for this model")
        expected = _pooled(hidden, pooling.pooling_type)
        if pooling.normalize:
            expected = torch.nn.functional.normalize(expected, dim=0)
        worst = max(worst, float((torch.tensor(output.outputs.embedding) - expected).abs().mean()))
    return _judged(worst, dtype, "numbers of embeddings")


def _pooled(hidden: Tensor, kind: str) -> Tensor:
    if kind in ("CLS", "LAST"):
        return hidden[0 if kind == "CLS" else -1]
    return hidden.amax(0) if kind == "MAX" else hidden.mean(0)


def _texts(vocab_size: int, longest: int) -> list[list[int]]:
    """Token ids of random texts, the same in each run."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (min(n, longest),), generator=generator).tolist() for n in _LENGTHS]


def _load(model_dir: Path, dtype: str, name: str | None = None) -> Any:
    """The model of transformers, with its plain (eager) attention. ``name`` is its class; None: a class that generates.
    Code in the model's directory does not run."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise ConfigError("compare needs transformers; pip install 'chairlift[hf]', or leave it out") from None
    try:
        if name is None:
            causal = transformers.AutoConfig.from_pretrained(model_dir).model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            name = "AutoModelForCausalLM" if causal else "AutoModelForImageTextToText"
        found = getattr(transformers, name).from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    except (ValueError, OSError) as error:
        raise ConfigError(f"compare: transformers cannot load {model_dir} ({error!s:.300}); leave it out") from None
    return found.eval()


def _judged(worst: float, dtype: str, what: str) -> str:
    most = _MOST[dtype]
    if not worst <= most:
        raise ModelLoadError(
            f"compare: {what} differ from those of transformers by {worst:.2g} in the mean; rounding in {dtype}"
            f" explains {most:g}: {_HINT}"
        )
    return f"equals transformers: {what} differ by {worst:.1g} in the mean of {len(_LENGTHS)} texts"
