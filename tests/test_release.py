"""tools/release.py finds what is wrong with a release."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from chairlift.kernels.cpu.library import supported_isas
from tools import release

CHANGELOG = (
    "# Changelog\n\nText.\n\n## Unreleased\n\n## 1.2.3 (2026-01-31)\n\n### Engine\n\n- New.\n\n## 1.2.2\n\n- Old.\n"
)
TRACKED = ["LICENSE", "README.md", "tests/test_a.py", "chairlift/a.py", "chairlift/vendor/b.LICENSE"]
TYPED = [f"{package}/py.typed" for package in release.PACKAGES]
WHEEL = [
    *("chairlift/a.py", "chairlift/vendor/b.LICENSE", "kernels.so", *TYPED),
    *("chairlift-1.2.3.dist-info/licenses/LICENSE", "chairlift-1.2.3.dist-info/METADATA"),
]


def test_the_section_of_a_version_is_cut_from_the_changelog() -> None:
    assert release.section(CHANGELOG, "1.2.3") == ("## 1.2.3 (2026-01-31)", "### Engine\n\n- New.\n")
    assert release.section(CHANGELOG, "1.2") is None


@pytest.mark.parametrize(
    ("version", "changelog", "page", "problem"),
    [
        ("1.2.3", CHANGELOG, "pip install chairlift==1.2.3", ""),
        ("1.2.3", CHANGELOG, "\ndocker run chairlift:1.2.2", "docs/a.md:2 names version 1.2.2, but this is 1.2.3"),
        ("1.2.3", CHANGELOG, "chairlift-1.2.4-py3-none-any.whl", "docs/a.md:1 names version 1.2.4, but this is 1.2.3"),
        ("1.2.4", CHANGELOG, "", "CHANGELOG.md has no section 1.2.4"),
        ("1.2.2", CHANGELOG, "", "write the date"),
        ("1.2.3", CHANGELOG.replace("01-31", "soon"), "", "write the date"),
        ("1.2.3", CHANGELOG.replace("Unreleased\n", "Unreleased\n\n- Newer.\n"), "", "lines under Unreleased"),
        ("1.2", CHANGELOG.replace("1.2.3", "1.2"), "", "three numbers"),
    ],
)
def test_the_version_is_the_same_everywhere(version: str, changelog: str, page: str, problem: str) -> None:
    found = list(release.version_problems(version, changelog, {"docs/a.md": page}))
    assert len(found) == bool(problem) and all(problem in each for each in found)


@pytest.mark.parametrize(
    ("status", "tags", "problem"),
    [
        ("", ["v1.2.2"], ""),
        (" M README.md\n?? new.py\n", [], "2 uncommitted changes, such as README.md"),
        ("", ["v1.2.3"], "the tag v1.2.3 exists"),
    ],
)
def test_a_release_is_a_commit_without_a_tag(status: str, tags: list[str], problem: str) -> None:
    found = list(release.tree_problems(status, tags, "1.2.3"))
    assert len(found) == bool(problem) and all(problem in each for each in found)


def test_the_documents_are_read_and_name_no_other_version() -> None:
    pages = release.documents()
    assert {"README.md", "docs/stability.md", "deploy/README.md"} <= set(pages) and "CHANGELOG.md" not in pages
    version = release.read_version()
    dated = f"## {version} (2026-01-31)\n"
    assert not list(release.version_problems(version, dated, pages))


@pytest.mark.parametrize(
    ("removed", "added", "problem"),
    [
        ("", "", ""),
        ("chairlift/a.py", "", "chairlift/a.py is missing"),
        ("chairlift_lab/py.typed", "", "chairlift_lab/py.typed is missing"),
        ("kernels.so", "", "kernels.so is missing"),
        ("chairlift-1.2.3.dist-info/licenses/LICENSE", "", "the licence LICENSE is missing"),
        ("", "tests/test_a.py", "is a test"),
        ("", "chairlift/conftest.py", "is a test"),
        ("", "chairlift/__pycache__/a.cpython-311.pyc", "product of another build"),
        ("", "../a.py", "outside"),
        ("", "/etc/a.py", "outside"),
    ],
)
def test_a_package_has_all_files_and_no_others(removed: str, added: str, problem: str) -> None:
    names = [name for name in [*WHEEL, added] if name not in ("", removed)]
    found = list(release.content_problems(names, TRACKED, "1.2.3", "kernels.so"))
    assert len(found) == bool(problem) and all(problem in each for each in found)


def test_a_file_with_a_path_of_the_machine_is_found(tmp_path: Path) -> None:
    contents = {"a.so": b"\0" + str(tmp_path / "csrc").encode() + b"\0", "b.py": b"print('/')"}
    found = list(release.path_problems(contents.items(), (tmp_path, Path("/"))))
    assert found == [f"a.so contains the path {tmp_path}"]


def test_both_kinds_of_packages_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.py", "chairlift-1.2.3/chairlift/a.py")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as built:
        built.writestr("chairlift/a.py", "a")
    assert dict(release.read_source_package(tmp_path / "source.tar.gz")) == {"chairlift/a.py": b"a"}
    assert dict(release.read_wheel(tmp_path / "a.whl")) == {"chairlift/a.py": b"a"}


def test_checksums_and_notes_are_written_beside_the_packages(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    release.write(tmp_path / "dist", [tmp_path / "a.whl"], "- New.\n")
    written = {path.name: path.read_bytes() for path in (tmp_path / "dist").iterdir()}
    sums = f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n".encode()
    assert written == {"a.whl": b"wheel", release.CHECKSUMS: sums, release.NOTES: b"- New.\n"}
    subprocess.run(["sha256sum", "--check", "--quiet", release.CHECKSUMS], cwd=tmp_path / "dist", check=True)


_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = %r
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("loading", file=sys.stderr)
print(f"ready at http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(%d))
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("body", "code", "problem"),
    [
        (b'{"choices": [{"message": {"content": "yes"}}]}', 0, ""),
        (b'{"choices": [{"message": {"content": " "}}]}', 0, "an empty answer"),
        (b'{"choices": []}', 0, "no answer"),
        (b'{"choices": [{"message": {"content": "yes"}}]}', 3, "exit code 3"),
    ],
)
def test_an_installed_server_must_start_answer_and_stop(tmp_path: Path, body: bytes, code: int, problem: str) -> None:
    command = [sys.executable, "-I", "-c", _SERVER % (body, code)]
    found = list(release.served_problems(command, tmp_path, {}))
    assert len(found) == bool(problem) and all(problem in each for each in found)


def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", "import sys; sys.exit('no kernels')"]
    (problem,) = release.served_problems(command, tmp_path, {})
    assert "did not start (exit code 1): no kernels" in problem


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the table of features needs the package triton")
@pytest.mark.skipif("avx2" not in supported_isas(), reason="the table of features needs AVX2 and the kernels")
def test_all_generated_tables_are_current() -> None:
    assert not list(release.table_problems())


def test_a_stale_table_is_named_with_the_command_that_makes_it() -> None:
    stale = release._stale(release.ROOT / "docs" / "public-api.txt", "tools.public_api", " --write")
    assert stale == "docs/public-api.txt is not current: run python tools/public_api.py --write"


@pytest.mark.nightly
def test_the_packages_of_this_commit_are_complete_and_the_wheel_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "got"), "auditwheel"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("auditwheel cannot be downloaded")
    assert release.make(tmp_path / "dist", shared=True) == []
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    assert {release.CHECKSUMS, release.NOTES} < names and len(names) == 4
