"""``chairlift pull``, ``list``, ``show`` and ``rm``, against a Hub on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.base.running_servers import RunningServer, announced
from tests.cli.conftest import Run
from tests.models.fake_hub import Hub, serve_hub, use_hub
from tests.models.gguf.make import to_gguf

CARD = b"---\nlicense: apache-2.0\ntags: [x]\n---\nlicense: other\n"


@pytest.fixture(scope="module")
def gguf(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return to_gguf(model_dir, path, "Q8_0", **{"general.license": "mit"}).read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: Path, gguf: bytes) -> Iterator[Hub]:
    """A Hub with a directory of safetensors, a repository of GGUF files, and one that no engine can load."""
    files = {file.name: file.read_bytes() for file in model_dir.iterdir()}
    with serve_hub() as hub:
        hub.repositories["people/model"] = {**files, "README.md": CARD}
        hub.repositories["people/model-GGUF"] = {"m-Q8_0.gguf": gguf, "m-F16.gguf": gguf, "README.md": CARD}
        strange = {"config.json": b'{"model_type": "strange"}', "model.safetensors": b"x"}
        hub.repositories["people/strange"] = strange
        use_hub(monkeypatch, hub, tmp_path / "cache")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        yield hub


def test_a_model_is_pulled_listed_shown_and_removed(chairlift: Run, hub: Hub, tmp_path: Path) -> None:
    code, out, err = chairlift("pull", "people/model")
    assert (code, err) == (0, []) and out[0].startswith("people/model: ") and str(tmp_path) in out[0]
    assert out[1] == "it can be loaded: chairlift run people/model"
    code, out, _ = chairlift("pull", "people/model-GGUF:q8_0")
    assert code == 0 and out[0].endswith("/m-Q8_0.gguf")
    code, out, _ = chairlift("pull", "people/strange")
    assert code == 1 and "it cannot be loaded: " in out[1] and "strange" in out[1]

    code, out, err = chairlift("list")
    assert (code, err, out[0].split()) == (0, [], ["NAME", "SIZE", "FORMAT", "LOADS"])
    rows = {line.split()[0]: line for line in out[1:]}
    assert list(rows) == ["bundled", "people/model", "people/model-GGUF:Q8_0", "people/strange"]
    assert rows["people/model"].endswith(" safetensors  yes") and rows["people/model-GGUF:Q8_0"].endswith("Q8_0    yes")
    assert " no: " in rows["people/strange"] and str(tmp_path) not in rows["people/strange"]
    assert chairlift("list", "--names")[1] == list(rows)

    facts = dict(line.split(maxsplit=1) for line in chairlift("show", "people/model-GGUF")[1])
    assert facts["family"] == "llama" and facts["weights"].startswith("GGUF, Q8_0") and facts["licence"] == "mit"
    code, out, _ = chairlift("show", "people/model")
    assert code == 0 and "licence        apache-2.0" in out and "context        256 tokens" in out
    assert "chat template  yes" in out and "weights        float32" in out
    assert chairlift("show", "people/strange")[0] == 1

    assert chairlift("rm", "people/model-GGUF:Q8_0", "people/model")[0] == 0
    assert chairlift("list", "--names")[1] == ["bundled", "people/strange"]
    code, _, err = chairlift("show", "people/model")
    assert code == 2 and "'people/model' is not in the cache of the Hugging Face Hub; it has people/strange" in err[0]


@pytest.mark.full
def test_one_of_several_gguf_files_is_removed_alone(chairlift: Run, hub: Hub) -> None:
    for quant in ("Q8_0", "F16"):
        assert chairlift("pull", f"people/model-GGUF:{quant}")[0] == 0
    assert chairlift("rm", "people/model-GGUF:F16")[0] == 0
    assert chairlift("list", "--names")[1] == ["bundled", "people/model-GGUF:Q8_0"]
    assert chairlift("show", "people/model-GGUF:Q8_0")[0] == 0
    hub.sent.clear()
    code, _, err = chairlift("pull", "people/model-GGUF")  # a usual one, without a word about missing safetensors
    assert (code, err) == (0, [])
    assert hub.sent == []


def test_a_model_that_a_server_has_loaded_is_not_removed(chairlift: Run, hub: Hub) -> None:
    chairlift("pull", "people/model")
    facts = {"pid": os.getpid(), "url": "http://127.0.0.1:9", "models": ("m",), "started_at": 0.0, "version": "1"}
    with announced(RunningServer(**facts, loaded=("people/model",))):
        code, _, err = chairlift("rm", "people/model")
        assert code == 2 and "the server at http://127.0.0.1:9 has loaded people/model" in err[0]
        assert chairlift("list", "--names")[1] == ["bundled", "people/model"]
        assert chairlift("rm", "people/model", "--force")[0] == 0


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("pull", "people/none"), "the Hugging Face Hub did not give a model of that name (RepositoryNotFoundError"),
        (("pull", "people/model-GGUF:Q3_K"), "has no GGUF file of the kind 'Q3_K'; it has F16, Q8_0"),
        (("pull", "people/model:Q8_0"), "has no GGUF files"),
        (("pull", "llama3.2:1b"), "looks like a name of Ollama's"),
        (("pull", "."), "is on this machine already"),
        (("rm", "."), "is a file or directory of yours"),
        (("rm", "people/none"), "'people/none' is not in the cache"),
        (("show", "people/none"), "'people/none' is not in the cache of the Hugging Face Hub; it has no models"),
        (("show", "/no/such/model"), "'/no/such/model' is not a directory"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(chairlift: Run, hub: Hub, argv: tuple[str, ...], told: str) -> None:
    code, out, err = chairlift(*argv)
    assert (code, out) == (2, []) and len(err) == 1 and told in err[0]


@pytest.mark.full
def test_without_a_network_the_error_says_so(chairlift: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    chairlift("pull", "people/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert chairlift("pull", "people/model")[0] == 0
    code, _, err = chairlift("pull", "people/other")
    assert code == 2 and "it is not in the cache, and the Hub cannot be reached or HF_HUB_OFFLINE is set" in err[0]


@pytest.mark.full
def test_an_interrupted_download_is_listed_as_one(chairlift: Run, hub: Hub, tmp_path: Path) -> None:
    chairlift("pull", "people/model")
    folder = tmp_path / "cache" / "models--people--model"
    (folder / "blobs" / "abc.incomplete").touch()
    (next((folder / "snapshots").iterdir()) / "model.safetensors").unlink()
    (line,) = (line for line in chairlift("list")[1] if "people/model" in line)
    assert line.endswith("no: its download was interrupted; chairlift pull people/model goes on")


def test_the_bundled_model_and_directories_are_shown(chairlift: Run, model_dir: Path) -> None:
    code, out, _ = chairlift("show")
    assert code == 0 and out[0] == "model          bundled" and "loads          yes" in out
    code, out, _ = chairlift("show", model_dir, "--template")
    assert code == 0 and "<|im_start|>" in "".join(out)
