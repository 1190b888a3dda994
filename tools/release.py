"""Makes and checks all that a release consists of::

    python tools/release.py --check     # checks what can be checked without building; writes nothing
    python tools/release.py             # also builds, checks and tries the packages, in dist/

The source package is made from the newest commit, and the wheel from the source package, with the kernels of all
instruction sets. The wheel is installed into a new environment, where it answers a prompt and serves, without a
compiler on the PATH. ``dist/`` gets both packages, their checksums, and the release notes. The commands that publish
are printed, not run.

Exit code 1: at least one problem was found. Each is one line on standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import wheel

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("chairlift", "chairlift_lab", "chairlift_train")
NO_COMPILER: Final = ("--only-binary", ":all:")
PROMPT: Final = "What is continuous batching?"
CHECKSUMS, NOTES = "SHA256SUMS", "NOTES.md"
_NAMED: Final = re.compile(r"\bchairlift(?:==|:|@|-)v?(\d+\.\d+\.\d+)")
"""The version in a command or a file name, such as ``chairlift==0.1.0`` or ``chairlift:0.1.0``."""

_READY: Final = re.compile(r"ready at (http://[0-9.]+:\d+)")
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


# --- checks that need no build ----------------------------------------------------------------------------------------


def section(changelog: str, version: str) -> tuple[str, str] | None:
    """(heading, text) of the version's section in the changelog; None if there is none."""
    for part in re.split(r"^(?=## )", changelog, flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        if heading.split()[1:2] == [version]:
            return heading, text.strip() + "\n"
    return None


def version_problems(version: str, changelog: str, pages: Mapping[str, str]) -> Iterator[str]:
    """Places that do not agree with the version. ``pages`` are the contents of documents by name."""
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        yield f"chairlift/version.py has {version!r}; a release needs three numbers, such as 1.2.3"
    unreleased = section(changelog, "Unreleased")
    if unreleased is not None and unreleased[1].strip():
        yield f"CHANGELOG.md still has lines under Unreleased; move them into the section {version}"
    found = section(changelog, version)
    if found is None:
        yield f"CHANGELOG.md has no section {version}"
    elif re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", found[0]) is None:
        yield f"CHANGELOG.md has the heading {found[0]!r}; write the date: '## {version} (2026-01-31)'"
    for name, text in pages.items():
        for number, line in enumerate(text.splitlines(), start=1):
            for named in _NAMED.findall(line):
                if named != version:
                    yield f"{name}:{number} names version {named}, but this is {version}"


def documents() -> dict[str, str]:
    """Contents of all documents and deployment files that may name a version, except the changelog."""
    files = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*"))
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(files)
        if path.is_file() and path.name != "CHANGELOG.md"
    }


def tree_problems(status: str, tags: Iterable[str], version: str) -> Iterator[str]:
    """Reasons why the working tree is not that of a release, from ``git status --porcelain`` and the tags."""
    changed = [line[3:] for line in status.splitlines()]
    if changed:
        yield f"the working tree has {len(changed)} uncommitted changes, such as {changed[0]}; commit them"
    if f"v{version}" in tags:
        yield f"the tag v{version} exists; a new release needs a new version"


def table_problems() -> Iterator[str]:
    """Tables and lists in documents that differ from what their scripts make."""
    from tools import feature_table, interface_table, markdown, model_table, preset_table, public_api, sampling_table

    made = {
        feature_table: (feature_table.PAGE, feature_table.BEGIN, feature_table.feature_table),
        interface_table: (interface_table.PAGE, interface_table.BEGIN, interface_table.interface_table),
        sampling_table: (sampling_table.PAGE, sampling_table.BEGIN, sampling_table.sampling_table),
    }
    for script, (page, begin, make) in made.items():
        text = page.read_text(encoding="utf-8")
        if markdown.replaced(text, begin, make()) != text:
            yield _stale(page, script.__name__)
    for name, text in preset_table.pages().items():
        if (ROOT / name).read_text(encoding="utf-8") != text:
            yield _stale(ROOT / name, preset_table.__name__)
    text = model_table.PAGE.read_text(encoding="utf-8")
    if model_table.with_tables(text) != text:
        yield _stale(model_table.PAGE, model_table.__name__)
    if public_api.public_api() != public_api.FILE.read_text(encoding="utf-8"):
        yield _stale(public_api.FILE, public_api.__name__, " --write")


def _stale(page: Path, module: str, flags: str = "") -> str:
    script = f"{module.replace('.', '/')}.py{flags}"
    return f"{page.relative_to(ROOT).as_posix()} is not current: run python {script}"


def check() -> Iterator[str]:
    """All problems that can be found without building."""
    version = read_version()
    yield from version_problems(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), documents())
    yield from tree_problems(_git("status", "--porcelain"), _git("tag").split(), version)
    yield from table_problems()


def read_version() -> str:
    """The version in chairlift/version.py."""
    from chairlift.version import __version__

    return __version__


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


# --- contents of the packages -----------------------------------------------------------------------------------------


def licences(names: Iterable[str]) -> set[str]:
    """The licences among the files: the project's own, and those of the JavaScript libraries."""
    return {name for name in names if PurePosixPath(name).name == "LICENSE" or name.endswith(".LICENSE")}


def content_problems(names: Iterable[str], tracked: Iterable[str], version: str, kernels: str) -> Iterator[str]:
    """What a package lacks or should not have.

    ``names`` are its files, without the folder of the version that a source package begins with. ``tracked`` are the
    files of the repository: all of the three packages must be in it (code, the bundled model, static pages,
    ``py.typed``). ``kernels`` is the file of the compiled kernels, or of their source.
    """
    files = set(names)
    wanted = {name for name in tracked if name.split("/")[0] in PACKAGES}
    wanted |= {f"{package}/py.typed" for package in PACKAGES} | {kernels}
    yield from (f"{name} is missing" for name in sorted(wanted - files))
    info = f"chairlift-{version}.dist-info/licenses/"
    kept = {name.removeprefix(info) for name in files}
    yield from (f"the licence {name} is missing" for name in sorted(licences(tracked) - kept))
    for name in sorted(files):
        parts = PurePosixPath(name).parts
        if "tests" in parts or parts[-1].startswith("test_") or parts[-1] == "conftest.py":
            yield f"{name} is a test"
        elif name.endswith((".pyc", ".o")) or "__pycache__" in parts:
            yield f"{name} is a product of another build"
        elif name.startswith("/") or ".." in parts:
            yield f"{name} would be written outside of the folder"


def path_problems(contents: Iterable[tuple[str, bytes]], folders: Iterable[Path]) -> Iterator[str]:
    """Files that contain the path of one of the folders, which exist only on the machine of the build."""
    paths = {str(folder).encode() for folder in folders if len(folder.parts) > 2}
    for name, data in contents:
        yield from (f"{name} contains the path {path.decode()}" for path in sorted(paths) if path in data)


def read_source_package(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name without the package's own folder, contents) of each file."""
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (stream := archive.extractfile(member)) is not None:
                yield member.name.partition("/")[2], stream.read()


def read_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of each file."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                yield name, archive.read(name)


# --- building and trying ----------------------------------------------------------------------------------------------


def build_source_package(work: Path) -> Path:
    """Build the source package of the newest commit below ``work``."""
    source = work / "commit"
    source.mkdir()
    archive = work / "commit.tar"
    _git("archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as content:
        content.extractall(source, filter="data")
    tools = work / "tools"
    venv.create(tools, with_pip=True)
    python = tools / "bin" / "python"
    _run(python, "-m", "pip", "install", "-q", "setuptools>=77")
    code = "from setuptools import build_meta; build_meta.build_sdist('built', {'--global-option': '--quiet'})"
    _run(python, "-c", code, cwd=source)
    (built,) = (source / "built").glob("chairlift-*.tar.gz")
    return built


def build_wheel(package: Path, work: Path) -> Path:
    """Build the wheel from a source package, below ``work``. So it has nothing that the source package lacks."""
    with tarfile.open(package) as content:
        content.extractall(work, filter="data")
    return wheel.build(work, work / "wheel", work / package.name.removesuffix(".tar.gz"))


def install(package: Path, work: Path, shared: bool) -> Path:
    """Install the wheel into a new environment below ``work``, and return its folder of programs.

    ``shared``: the dependencies are those of the environment that runs this script, so nothing is downloaded.
    """
    venv.create(work / "installed", with_pip=True)
    programs = work / "installed" / "bin"
    # Nothing is compiled: a dependency that has only a source package for this machine is an error.
    _run(programs / "python", "-m", "pip", "install", "-q", *NO_COMPILER, *["--no-deps"] * shared, package, cwd=work)
    if shared:
        (site,) = (work / "installed" / "lib").glob("python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return programs


def try_problems(programs: Path, work: Path) -> Iterator[str]:
    """Let the installed program answer a prompt and serve, and compare its kernels with all instruction sets. No
    program of this machine is on its PATH."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    outside["PATH"] = str(programs)
    command = [programs / "chairlift", "generate", PROMPT, "--max-tokens", "16"]
    done = subprocess.run(command, cwd=work, env=outside, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        yield f"the installed chairlift gave no answer (exit code {done.returncode}): {done.stderr.strip()[-500:]}"
        return
    yield from served_problems([programs / "chairlift", "serve", "--port", "0"], work, outside)
    code = "from chairlift.kernels.cpu.library import built_isas; print(*built_isas())"
    done = subprocess.run([programs / "python", "-c", code], cwd=work, env=outside, capture_output=True, text=True)
    sys.path.insert(0, str(ROOT / "csrc"))
    from compile_kernels import SETS

    lacking = [name for name in SETS[platform.machine()] if name not in done.stdout.split()]
    if lacking:
        yield f"the installed kernels lack {', '.join(lacking)}"


def served_problems(command: Sequence[str | Path], work: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Start a server with ``command``, send it one chat, and stop it."""
    said = list[str]()
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, **streams) as server:
        assert server.stderr is not None
        for line in server.stderr:
            said.append(line)
            if found := _READY.search(line):
                break
        else:
            yield f"the installed server did not start (exit code {server.wait()}): {''.join(said)[-500:]}"
            return
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}
        headers = {"Content-Type": "application/json"}
        try:
            asked = urllib.request.Request(f"{found[1]}/v1/chat/completions", json.dumps(body).encode(), headers)
            with _OPENER.open(asked, timeout=120) as answer:
                if not json.load(answer)["choices"][0]["message"]["content"].strip():
                    yield "the installed server gave an empty answer"
        except (OSError, ValueError, LookupError) as error:
            yield f"the installed server gave no answer: {error}"
        server.terminate()
        server.communicate()
        if server.returncode:
            yield f"the installed server ended with exit code {server.returncode}"


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run(command, check=True, cwd=cwd, stdout=sys.stderr)


def make(folder: Path, shared: bool) -> list[str]:
    """Build the packages and return their problems. If there are none, write the packages, their checksums and the
    release notes to ``folder``."""
    version, tracked = read_version(), _git("ls-files").splitlines()
    os.environ.setdefault("SOURCE_DATE_EPOCH", _git("log", "-1", "--format=%ct").strip())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        package = build_source_package(work)
        problems = list(package_problems(package, read_source_package(package), tracked, version, work))
        built = build_wheel(package, work)
        problems += package_problems(built, read_wheel(built), tracked, version, work)
        problems += try_problems(install(built, work, shared), work)
        if not problems:
            write(folder, [package, built], notes(version))
    return problems


def package_problems(
    path: Path, files: Iterable[tuple[str, bytes]], tracked: Iterable[str], version: str, work: Path
) -> Iterator[str]:
    """Problems of a package with these files, which was built below ``work``."""
    contents = dict(files)
    kernels = wheel.LIBRARY if path.suffix == ".whl" else "csrc/compile_kernels.py"
    if not path.name.startswith(f"chairlift-{version}"):
        yield f"{path.name}: the name does not begin with chairlift-{version}"
    for problem in content_problems(contents, tracked, version, kernels):
        yield f"{path.name}: {problem}"
    for problem in path_problems(contents.items(), (work, ROOT, Path.home())):
        yield f"{path.name}: {problem}"


def notes(version: str) -> str:
    """The version's section of the changelog, without its heading. Empty if there is none."""
    found = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    return found[1] if found else ""


def write(folder: Path, packages: Iterable[Path], text: str) -> None:
    """Copy the packages into the folder, with their checksums (for ``sha256sum --check``) and the release notes."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = []
    for package in packages:
        data = package.read_bytes()
        (folder / package.name).write_bytes(data)
        sums.append(f"{hashlib.sha256(data).hexdigest()}  {package.name}\n")
    (folder / CHECKSUMS).write_text("".join(sums))
    (folder / NOTES).write_text(text)


def main() -> int:
    """Print problems, and the commands that publish if there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="build nothing, write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the results (default: dist)")
    parser.add_argument(
        "--shared-packages",
        action="store_true",
        help="try the wheel with the dependencies of this environment instead of new ones",
    )
    args = parser.parse_args()
    problems = list(check())
    if not problems and not args.check:
        problems += make(args.output.resolve(), args.shared_packages)
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if problems:
        return 1
    if not args.check:
        version = read_version()
        # Without "verbatim", git would remove the headings of the notes as comments.
        print(f"git tag --annotate v{version} --cleanup=verbatim --file {args.output / NOTES}")
        print(f"git push origin v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
