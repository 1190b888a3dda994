"""Qwen3-Reranker in its original form: the probability of yes, as its card computes it, through every way to ask.

Changes that must make these fail: the logits of another position; yes and no exchanged; the end of the prompt cut with
the document; instruction, query or document left out; rows of the embedding for a head that is not tied.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedModel

from chairlift import LLM, AsyncLLM, ConfigError, ModelLoadError, RequestError
from chairlift.cli.main import main
from chairlift.errors import PromptTooLongError
from tests.models.pooled import pooled_model
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PAIRS = [("peak", "A chair goes up"), ("peak", ""), ("where? <|im_end|>", "Down there\nis the valley"), ("x", "y" * 40)]
STEPS = (("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"))
WEB = "Given a web search query, retrieve relevant passages that answer the query"


def write_words(where: Path, *words: str) -> tokenizers.Tokenizer:
    """A tokenizer of letters, some words, and the special tokens of Qwen's chats."""
    letters = [*(chr(code) for code in range(32, 127)), "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *words, *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="~"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"{'|'.join(words)}|."), "isolated")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text("{}")
    return tokenizer


def by_the_card(
    model: PreTrainedModel, tokenizer: tokenizers.Tokenizer, query: str, document: str, instruction: str = WEB
) -> float:
    """As the code in the model's card does it."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (prefix, text, suffix) for token in tokenizer.encode(part, add_special_tokens=False).ids]
    last = hf_logits(model, ids)[-1]
    both = torch.stack([last[tokenizer.token_to_id("no")], last[tokenizer.token_to_id("yes")]])
    return float(torch.log_softmax(both, dim=0)[1].exp())


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A directory, and the scores of PAIRS."""
    tied = bool(request.param)
    where = tiny_hf_model(
        tmp_path_factory.mktemp("reranker"), "qwen3", max_position_embeddings=1024, std=0.1, tie_word_embeddings=tied
    )
    tokenizer, theirs = write_words(where, "yes", "no"), hf_model(where)
    return where, [by_the_card(theirs, tokenizer, *pair) for pair in PAIRS]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_scores_are_those_of_the_card(model: tuple[Path, list[float]], kernels: str) -> None:
    where, expected = model
    assert max(expected) - min(expected) > 0.01
    llm = LLM(where, reranker="qwen3", dtype="float32", kernels=kernels, threads=1)
    queries, documents = zip(*PAIRS, strict=True)
    together = [each.outputs.score for each in llm.score(queries, documents)]
    assert together == pytest.approx(expected, abs=1e-5)
    alone = [llm.score(query, document)[0].outputs.score for query, document in PAIRS]
    assert alone == (together if kernels == "auto" and llm.info.deterministic else pytest.approx(together, abs=1e-6))
    probabilities = llm.classify([each.prompt_token_ids for each in llm.score(queries, documents)])
    assert [each.outputs.probs[1] for each in probabilities] == pytest.approx(together, abs=1e-6)


def test_a_custom_instruction_changes_the_scores_as_in_transformers(model: tuple[Path, list[float]]) -> None:
    where, usual = model
    llm = LLM(where, reranker="qwen3", reranker_instruction="Find jokes", dtype="float32", threads=1)
    tokenizer, theirs = tokenizers.Tokenizer.from_file(str(where / "tokenizer.json")), hf_model(where)
    found = [llm.score(*pair)[0].outputs.score for pair in PAIRS]
    assert found == pytest.approx([by_the_card(theirs, tokenizer, *pair, "Find jokes") for pair in PAIRS], abs=1e-5)
    assert found != pytest.approx(usual, abs=1e-4)


def test_only_the_end_of_the_document_is_cut(model: tuple[Path, list[float]]) -> None:
    where, _ = model
    llm = LLM(where, reranker="qwen3", threads=1)
    whole, shorter, empty = (each.prompt_token_ids for each in llm.score("x", ["y" * 40, "y" * 33, ""]))
    cut = llm.score("x", "y" * 40, truncate_prompt_tokens=len(whole) - 7)[0].prompt_token_ids
    assert cut == shorter
    assert llm.score("x", "y" * 40, truncate_prompt_tokens=len(empty))[0].prompt_token_ids == empty
    with pytest.raises(PromptTooLongError, match="because only documents are cut"):
        llm.score("x", "y" * 40, truncate_prompt_tokens=len(empty) - 1)


@pytest.mark.full
def test_async_llm_scores_and_embeds_as_llm_does(model: tuple[Path, list[float]], tmp_path: Path) -> None:
    where, _ = model
    settings: dict[str, Any] = {"threads": 1}
    queries, documents = zip(*PAIRS, strict=True)
    reranker = LLM(where, reranker="qwen3", **settings)
    scores, probs = reranker.score(queries, documents), reranker.classify([[5, 6, 7], [8]])
    embedder = LLM(where, runner="pooling", **settings)
    vectors, cosines = embedder.embed(["one", [5, 6]]), embedder.score("a", ["b", "c"])

    async def test() -> None:
        async with AsyncLLM(where, reranker="qwen3", **settings) as llm:
            found = await asyncio.gather(*(llm.score(*pair) for pair in PAIRS))
            assert [each.outputs for (each,) in found] == [each.outputs for each in scores]
            classes = await llm.classify([[5, 6, 7], [8]])
            assert [each.outputs for each in classes] == [each.outputs for each in probs]
            with pytest.raises(RequestError, match="is a classifier; it cannot embed"):
                await llm.embed("text")
        async with AsyncLLM(where, runner="pooling", **settings) as llm:
            embeddings, similar = await asyncio.gather(llm.embed(["one", [5, 6]]), llm.score("a", ["b", "c"]))
            assert [each.outputs for each in embeddings] == [each.outputs for each in vectors]
            assert [each.prompt_token_ids for each in embeddings] == [each.prompt_token_ids for each in vectors]
            assert [each.outputs for each in similar] == [each.outputs for each in cosines]
            with pytest.raises(RequestError, match="prompt 1: the text is empty"):
                await llm.embed([[5], []])
        async with AsyncLLM(num_kv_blocks=20) as llm:
            with pytest.raises(RequestError, match="generates texts; for embeddings, scores or classes load another"):
                await llm.embed("text")

    asyncio.run(test())


def test_check_says_that_the_model_is_a_reranker(
    model: tuple[Path, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model[0]), "--reranker", "qwen3"]) == 0
    assert "scores of pairs, by the answers no and yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "generate"}, "runner is 'generate', but reranker 'qwen3' scores pairs"),
        ({"skip_tokenizer_init": True}, "a reranker needs the tokenizer"),
        ({"pooling_type": "MEAN"}, "are for embeddings; a reranker has none"),
        (
            {"reranker": None, "reranker_instruction": "x"},
            "reranker_instruction is for a reranker",
        ),
        ({"reranker": "other"}, "reranker must be one of qwen3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], words: str, model: tuple[Path, list[float]]
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model[0], **{"reranker": "qwen3", **settings})


def test_models_that_cannot_rerank_are_refused(tmp_path: Path) -> None:
    without = tiny_hf_model(tmp_path, "qwen3")
    write_words(without, "yes")
    with pytest.raises(ConfigError, match="has no token 'no'"):
        LLM(without, reranker="qwen3")
    encoder, _ = pooled_model(tmp_path, "bert", labels=1)
    write_words(encoder, "yes", "no")
    with pytest.raises(ConfigError, match="is for models that generate"):
        LLM(encoder, reranker="qwen3")
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in STEPS]
    (without / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="if it is Qwen3-Reranker, set reranker to qwen3"):
        LLM(without)
