"""The mechanical part of the rules for prose in CONTRIBUTING.md: sentence openings, and line length in documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_COLUMNS = 100
_RIDDLE = re.compile(r"(?:^|[.!?:;]\s+)Of (?:who|what|which|those|these|them|whom|whose|who|whoever|whatever)\b")
"""A sentence that begins with a clause in place of its subject."""
_FRAGMENT = re.compile(r"^Of (?!course\b)")
"""A docstring or comment that leaves its subject out, such as "Of the answer, in seconds"."""

NOT_REFLOWED = {
    "docs/speculation.md",
}
"""Documents whose lines are still longer. ``python tools/reflow.py FILE`` fills them; add none."""

PYTHON = sorted(
    path
    for folder in ("chairlift", "chairlift_lab", "chairlift_train", "csrc", "tools", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
NATIVE = sorted(path for suffix in ("*.h", "*.cpp") for path in (ROOT / "csrc").rglob(suffix))
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose_of_python(text: str) -> Iterator[str]:
    """Every string that stands as a statement (docstrings, also of fields), and every block of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())
    comments = [
        (token.start[0], token.string.lstrip("#! "))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from _blocks(comments)


def prose_of_native(text: str) -> Iterator[str]:
    """Every block of ``//`` comments."""
    lines = [(number, line.partition("//")) for number, line in enumerate(text.splitlines(), start=1)]
    yield from _blocks([(number, comment.strip()) for number, (_, slashes, comment) in lines if slashes])


def _blocks(comments: list[tuple[int, str]]) -> Iterator[str]:
    """Join comments of neighbouring lines."""
    block: list[str] = []
    last = -1
    for number, comment in comments:
        if block and number != last + 1:
            yield " ".join(block)
            block = []
        block.append(comment)
        last = number
    if block:
        yield " ".join(block)


def test_sentences_begin_with_their_subject() -> None:
    found = []
    for path in [*PYTHON, *NATIVE]:
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        blocks = prose_of_python(text) if path.suffix == ".py" else prose_of_native(text)
        found += [(name(path), prose) for prose in blocks if _RIDDLE.search(prose) or _FRAGMENT.search(prose)]
    assert not found


def test_documents_begin_sentences_with_their_subject() -> None:
    quoted = re.compile(r"^\|.*?$|^```.*?^```$|`[^`]*`|\"[^\"]*\"", re.MULTILINE | re.DOTALL)
    found = []
    for path in DOCUMENTS:
        paragraphs = quoted.sub("", path.read_text(encoding="utf-8")).split("\n\n")
        found += [(name(path), text) for text in paragraphs if _RIDDLE.search(" ".join(text.split()))]
    assert not found


def test_lines_of_documents_are_short() -> None:
    """Prose only. Code, tables and headings have their own length, and so has a line with a link."""
    found = []
    for path in DOCUMENTS:
        in_code = name(path) in NOT_REFLOWED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.lstrip().startswith("```"):
                in_code = name(path) in NOT_REFLOWED or not in_code
            elif not in_code and not line.startswith(("|", "#")) and "](" not in line and len(line) > MOST_COLUMNS:
                found.append(f"{name(path)}:{number} has {len(line)} columns")
    assert not found


def test_each_document_has_a_line_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    decisions = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    for path in DOCUMENTS:
        if path.name != "README.md" and path.parent == ROOT / "docs":
            assert f"]({path.name})" in index, f"docs/README.md does not mention {path.name}"
        elif path.name != "README.md" and path.parent == ROOT / "docs" / "decisions":
            assert f"]({path.name})" in decisions, f"docs/decisions/README.md does not mention {path.name}"


def test_documents_link_to_files_that_exist() -> None:
    """Relative links, and the files that the glossary names below ``chairlift/``."""
    missing = []
    for path in [*DOCUMENTS, ROOT / "README.md", ROOT / "ARCHITECTURE.md"]:
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", text):
            if not (path.parent / link).exists():
                missing.append(f"{name(path)}: {link}")
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)*(?:\.py|/))`", glossary)) - {"chairlift/"}
    missing += [
        f"docs/glossary.md: {file}"
        for file in named
        if not any((folder / file).exists() for folder in (ROOT / "chairlift", ROOT))
    ]
    assert len(named) > 40
    assert not missing


@pytest.mark.parametrize(
    ("page", "title"), [("docs/README.md", "## Where is it in the code?"), ("CONTRIBUTING.md", "## Add something")]
)
def test_each_answer_about_the_code_names_at_most_two_modules_and_definitions_that_exist(page: str, title: str) -> None:
    section = (ROOT / page).read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| (?!Question|You want)\S", line)]
    wrong = []
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        paths = [ROOT / each for each in quoted if re.fullmatch(r"[a-z_]+(/[\w.]+)+/?", each)]
        wrong += [f"{path} does not exist" for path in paths if not path.exists()]
        modules = [path for path in paths if path.suffix == ".py" and path.is_file() and "tests" not in path.parts]
        if len(modules) > 2:
            wrong.append(f"more than two modules: {row}")
        sources = "\n".join(module.read_text(encoding="utf-8") for module in modules)
        for each in quoted:
            if modules and re.fullmatch(r"_?[A-Z]\w+(\.\w+)?", each):
                wrong += [f"{each}: {part}" for part in each.split(".") if not _defines(sources, part)]
    assert len(rows) > 10
    assert not wrong


def _defines(source: str, name_: str) -> bool:
    return re.search(rf"^ *(?:class|def|async def) {name_}\b|^{name_}\b.* = ", source, re.MULTILINE) is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Of who answered: 0 or 1."""', True),
        ("# The rest. Of those that wait, the first.", True),
        ('x = 1\n"""Of the answer, in seconds."""', True),
        ('"""Index of the server that answered."""', False),
        ("# Share of what is left.", False),
    ],
)
def test_the_check_finds_what_it_should(text: str, found: bool) -> None:
    assert found == any(_RIDDLE.search(prose) or _FRAGMENT.search(prose) for prose in prose_of_python(text))


def test_the_tree_of_the_architecture_page_lists_the_folders() -> None:
    """Each folder on the first level of a package is in the tree, and each name in the tree exists."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = next(part for part in text.split("```") if part.startswith("text\nchairlift/")).splitlines()[1:]
    listed: set[Path] = set()
    above: list[Path] = []
    for line in lines:
        found = re.match(r"((?:│   |    )*)(?:├── |└── |)([\w.]+(?:/\w+)*/?)(?=[ ])", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + ("── " in line)
        above = [*above[:depth], (above[depth - 1] if depth else ROOT) / found[2]]
        listed.add(above[-1])
    assert not [str(path) for path in listed if not path.exists()]
    packages = [ROOT / name for name in ("chairlift", "chairlift_lab", "chairlift_train")]
    folders = {path for package in packages for path in package.iterdir() if path.is_dir()}
    assert not {path for path in folders if path.name != "__pycache__"} - listed


def test_references_in_docstrings_lead_to_names_that_exist() -> None:
    """References with a full path, such as ``:class:`chairlift.errors.ConfigError```."""
    missing = []
    for path in PYTHON:
        for reference in re.findall(r":\w+:`~?(chairlift\w*(?:\.\w+)+)`", path.read_text(encoding="utf-8")):
            parts = reference.split(".")
            modules = [ROOT.joinpath(*parts[:end]) for end in range(len(parts), 0, -1)]
            at, module = next((at, each) for at, each in enumerate(modules) if _is_module(each))
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if at and not re.search(rf"\b{parts[len(parts) - at]}\b", source.read_text(encoding="utf-8")):
                missing.append(f"{name(path)}: {reference}")
    assert not missing


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()
