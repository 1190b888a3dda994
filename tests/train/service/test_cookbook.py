"""Recipes of the tinker cookbook, with a server: on the bundled model, and on SmolLM2."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config_json
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift.text.tokenizer.gguf_tokenizer import gguf_tokenizer
from tests.free_port import free_port
from tests.models.gguf.make import real_gguf
from tools.train_bundled_model import ASSETS_DIR

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).with_name("cookbook_session.py")
SECONDS = 1200
RECIPES = ("arithmetic", "chat_sl", "shorter", "guess_number", "dpo", "distillation")


@pytest.fixture(scope="module")
def cookbook_python() -> str:
    """A Python that has the client and the cookbook, which need other versions of some packages than these tests:
    ``TINKER_PYTHON`` names it (``pip install tinker 'tinker-cookbook[math-rl]'`` in an environment of its own)."""
    python = os.environ.get("TINKER_PYTHON")
    if python is None:
        pytest.skip("TINKER_PYTHON names no Python with the tinker cookbook")
    if subprocess.run([python, "-c", "import tinker_cookbook"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no tinker cookbook")
    return python


@pytest.fixture(scope="module")
def smollm2(models: Path) -> str:
    """Name of SmolLM2-135M-Instruct: a directory with unquantised weights, made from a quantised file."""
    source = real_gguf()
    folder = models / "org" / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(gguf_config_json(GGUFModel(source))))
    content, beside = gguf_tokenizer(GGUFModel(source))
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **beside}))
    model = load_model(source, read_config(source), torch.bfloat16, weight_format=PLAIN)
    weights = {name: each.contiguous() for name, each in hf_state_dict(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return "org/smollm2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory below which the models have the names that clients use: they load tokenizers by them."""
    root = tmp_path_factory.mktemp("cookbook")
    (root / "org").mkdir()
    (root / "org" / "bundled").symlink_to(ASSETS_DIR)
    return root


@contextlib.contextmanager
def serving(model: Path, name: str, runs: Path, context: int) -> Iterator[str]:
    """Context manager: the address of a server that trains the model."""
    port = free_port()
    command = [sys.executable, "-m", "chairlift", "serve", str(model), "--enable-training", "--port", str(port)]
    command += ["--training-dir", str(runs), "--served-model-name", name, "--max-model-len", str(context)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def play(python: str, models: Path, name: str, recipe: str, directory: Path, context: int) -> None:
    with serving((models / name).resolve(), name, directory / "runs", context) as url:
        environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [python, str(SCRIPT), recipe, url, name, str(directory)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, cwd=models, env=environment, check=False
        )
        assert done.stdout.strip().endswith("done"), done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "guess_number"])
def test_a_recipe_runs_on_the_bundled_model(cookbook_python: str, models: Path, recipe: str, tmp_path: Path) -> None:
    """The turns of ``guess_number`` do not fit into its context."""
    play(cookbook_python, models, "org/bundled", recipe, tmp_path, 512)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_smollm2(
    cookbook_python: str, models: Path, smollm2: str, recipe: str, tmp_path: Path
) -> None:
    play(cookbook_python, models, smollm2, recipe, tmp_path, 2048)
