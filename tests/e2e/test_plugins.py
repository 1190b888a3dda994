"""A family, a format of tool calls and one of reasoning from a module outside the package are served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import chairlift
from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig, ServerConfig
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.model_files import read_network
from chairlift.models.registry import FAMILIES
from chairlift.server.http.lifecycle import start_engine
from chairlift.text.tool_calls import AnswerReader, named_reasoning_format, named_tool_format, read_answer
from tests.e2e.server_process import ServerProcess

HERE = "tests.e2e.outside"
PROMPT = "What is a block table?"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}\n{% endfor %}"
)
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    FAMILIES.pop("made_up", None)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The bundled model, as a checkpoint of the made-up family."""
    model_dir = tmp_path / "model"
    shutil.copytree(Path(chairlift.__file__).parent / "assets", model_dir)
    fields = json.loads((model_dir / "config.json").read_text())
    fields |= {
        "model_type": "made_up",
        "architectures": ["MadeUpForCausalLM"],
        "depth": fields.pop("num_hidden_layers"),
    }
    (model_dir / "config.json").write_text(json.dumps(fields))
    return model_dir


def test_families_from_outside_are_served(model_dir: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=16)
    expected = LLM(num_kv_blocks=64).generate(PROMPT, greedy)[0].outputs[0].text
    llm = LLM(model_dir, num_kv_blocks=64, model_impl=f"{HERE}:MADE_UP")
    assert llm.generate(PROMPT, greedy)[0].outputs[0].text == expected
    (tmp_path / "template").write_text(TEMPLATE)
    flags = ["--model-impl", f"{HERE}:MADE_UP", "--tool-call-parser", f"{HERE}:ARROWS", "--num-kv-blocks", "64"]
    flags += ["--chat-template", str(tmp_path / "template"), "--served-model-name", "m"]
    with ServerProcess(str(model_dir), *flags) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="m", prompt=PROMPT, temperature=0, max_tokens=16)
        assert answer.choices[0].text == expected
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [NOW]}
        reply = client.chat.completions.create(**asked, tool_choice="required", seed=1, max_tokens=400)
        calls = reply.choices[0].message.tool_calls
        assert calls and {call.function.name for call in calls} == {"now"}


def test_without_the_setting_the_family_is_unknown(model_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match="model_type 'made_up' is not supported"):
        read_network(model_dir, "native")


def test_formats_read_answers() -> None:
    calls, reasoning = named_tool_format(f"{HERE}:ARROWS"), named_reasoning_format(f"{HERE}:MUSING")
    reader = AnswerReader(calls, reasoning, {"now": {"type": "object"}})
    answer = read_answer('(hm, late? hm)So:\n=>{"name": "now", "arguments": {}}<=', reader)
    assert (answer.reasoning, answer.content) == (", late?", "So:")
    assert [call.name for call in answer.calls] == ["now"]
    assert (named_tool_format("auto"), named_reasoning_format("none")) == (None, None)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:FAMILY", "model_impl 'nowhere:FAMILY' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:MISSING", "cannot be imported: AttributeError"),
        (f"{HERE}:ARROWS", "is of type ToolFormat, and must be a Family; start from"),
        ("chairlift.models.family:Family", "is the class Family, and must be a Family; start from"),
        (f"{HERE}:SECOND_LLAMA", "is for model_type 'llama', which Chairlift has itself"),
    ],
)
def test_families_that_cannot_be_used_are_refused(model_dir: Path, path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(model_dir, model_impl=path)


def test_a_family_is_for_its_own_models() -> None:
    with pytest.raises(ConfigError, match=r"is for model_type 'made_up', and .* has 'llama'; leave model_impl out"):
        LLM(model_impl=f"{HERE}:MADE_UP")
    with pytest.raises(ConfigError, match="HashLM has no layers; leave model_impl out"):
        LLM("hashlm", model_impl=f"{HERE}:MADE_UP")


def test_settings_name_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="model_impl must be auto, native, transformers or module:FAMILY; got 'x'"):
        EngineConfig.from_flat({"model_impl": "x"})
    with pytest.raises(ConfigError, match=r"tool_call_parser must be auto, harmony.* none or module:FORMAT; got 'x'"):
        ServerConfig(tool_call_parser="x")
    with pytest.raises(ConfigError, match=r"reasoning_parser must be auto, .*, none or module:FORMAT; got 7"):
        ServerConfig(reasoning_parser=7)  # type: ignore[arg-type]


def test_a_server_refuses_a_format_before_it_loads() -> None:
    for setting, kind in (("tool_call_parser", "ToolFormat"), ("reasoning_parser", "ReasoningFormat")):
        config = ServerConfig(**{setting: f"{HERE}:MADE_UP"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{setting} .* is of type Family, and must be a {kind}"):
            start_engine(EngineConfig(), config, lambda *_: None)
