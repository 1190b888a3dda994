"""The tests that the newest official Python client brings along, against a real server. They need a package registry.

The source distribution of openai has them. They were written for a mock that accepts everything, so some of their
requests are refused. :data:`REFUSED` lists these, and nothing else may fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess
from tests.models.gguf.make import real_gguf

pytestmark = pytest.mark.nightly

_HELPERS = ("pytest-asyncio", "aiohttp", "rich", "inline-snapshot")
_NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
"""Names of models in the requests of the tests."""
_ALL = "_with_all_params"

REFUSED: dict[str, set[str]] = {
    "chat.test_completions": {
        *(f"create{_ALL}_overload_{kind}" for kind in (1, 2)),  # audio, functions, store, web_search_options, ...
        *("retrieve", "update", "delete", "list", f"list{_ALL}"),  # chats are not stored
    },
    "chat.completions.test_messages": {"list", f"list{_ALL}"},
    "test_completions": {f"create{_ALL}_overload_{kind}" for kind in (1, 2)},  # best_of: 0, a key that is no token
    "test_models": {"delete"},
    "test_files": {"create", f"create{_ALL}", f"list{_ALL}", "retrieve", "delete", "retrieve_content"},
    "test_batches": {"create", f"create{_ALL}", f"list{_ALL}", "retrieve", "cancel"},
    "test_responses": {
        *(f"{call}{rest}_overload_{kind}" for call in ("create", "retrieve") for rest in ("", _ALL) for kind in (1, 2)),
        *("delete", "cancel", "compact", f"compact{_ALL}"),
    },
    "responses.test_input_items": {"list", f"list{_ALL}"},
    "responses.test_input_tokens": {"count", f"count{_ALL}"},
}
"""Module below tests/api_resources -> calls that the server refuses. ``overload_1`` asks for a whole answer,
``overload_2`` for a stream. docs/server.md gives the reasons."""
ANSWERED = {
    ("chat.test_completions", "create_overload_1"),
    ("chat.test_completions", "create_overload_2"),
    ("test_completions", "create_overload_1"),
    ("test_completions", "create_overload_2"),
    ("test_models", "list"),
    ("test_models", "retrieve"),
    ("test_files", "list"),
    ("test_batches", "list"),
}
"""(module, call) of the requests that must be answered."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the client's sources and tests, with the packages that the tests need in ``packages``."""
    folder = tmp_path_factory.mktemp("openai")
    pip = (sys.executable, "-m", "pip")
    for command in (
        (*pip, "download", "-q", "--no-deps", "--no-binary", "openai", "-d", str(folder), "openai"),
        (*pip, "install", "-q", "--upgrade", "--target", str(folder / "packages"), "openai", *_HELPERS),
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(command[3:])} failed: {done.stderr[-300:]}")
    (archive,) = folder.glob("openai-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = folder.glob("openai-*/")
    (folder / "packages").rename(unpacked / "packages")
    return unpacked


def outcomes(sources: Path, server: ServerProcess, report: Path) -> dict[tuple[str, str], list[str]]:
    """(module, call) -> first line of each failure; empty if all tests of the call pass."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(sources / "src"), str(sources / "packages")]),
        "TEST_API_BASE_URL": f"http://127.0.0.1:{server.port}/v1",
    }
    names = (*(f"test_{name}.py" for name in ("completions", "models", "files", "batches", "responses")),)
    tests = [f"tests/api_resources/{name}" for name in ("chat", "responses", *names)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    done = subprocess.run(
        [*command, f"--junit-xml={report}"], cwd=sources, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1) and report.is_file(), done.stdout[-4000:] + done.stderr[-2000:]
    found: dict[tuple[str, str], list[str]] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        module, _, _ = case.attrib["classname"].removeprefix("tests.api_resources.").rpartition(".")
        call = case.attrib["name"].partition("[")[0]
        for prefix in ("test_method_", "test_raw_response_", "test_streaming_response_"):
            call = call.removeprefix(prefix)
        if not call.startswith("test_"):  # the others check the client's own errors
            failed = [each.attrib.get("message", "")[:300] for each in case if each.tag in ("failure", "error")]
            found.setdefault((module, call), []).extend(failed)
    return found


@pytest.mark.parametrize("model", ["bundled", "SmolLM2"])
def test_the_official_tests_pass_but_for_what_is_refused(sources: Path, tmp_path: Path, model: str) -> None:
    path = real_gguf() if model == "SmolLM2" else Path(__file__).parents[2] / "chairlift" / "assets"
    flags = ("--served-model-name", *_NAMES, "--batch-dir", str(tmp_path / "files"), "--max-model-len", "128")
    with ServerProcess(str(path), *flags) as server:
        found = outcomes(sources, server, tmp_path / "report.xml")
    assert set(found) >= ANSWERED
    wrong = {
        (module, call): lines
        for (module, call), lines in found.items()
        if call not in REFUSED.get(module, ()) and lines
    }
    assert not wrong
    stale = {(module, call) for module, calls in REFUSED.items() for call in calls if not found.get((module, call))}
    assert not stale, "these are no longer refused, or are gone"
    lines = [line for lines in found.values() for line in lines]
    refusals = ("Error code: 400", "Error code: 404", "Error code: 405")
    assert not [line for line in lines if not any(each in line for each in refusals)]
