from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.cli.main import main
from tests.text.tokenizer import tiny

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Result = tuple[int, list[str], list[str]]
Run = Callable[..., Result]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template."""
    from tests.models.tiny import tiny_hf_model

    backend = tiny.byte_level_backend()
    folder = tiny_hf_model(
        tmp_path_factory.mktemp("cli"),
        "llama",
        vocab_size=backend.get_vocab_size(),
        max_position_embeddings=256,
        bos_token_id=backend.token_to_id("<s>"),
        eos_token_id=backend.token_to_id("<|im_end|>"),
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def chairlift(capsys: pytest.CaptureFixture[str]) -> Run:
    """Function that runs a command in this process. It returns (exit code, lines of standard output, lines of standard
    error)."""

    def run(*argv: str | Path) -> Result:
        code = main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run
