"""Imports point down only, the brain knows no tensors, and nothing in the package can run what it reads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGES, ROOT, imports, modules, tree

TOWERS = ["clip_tower", "patch_tower", "pooled_tower", "vision_config", "vision_files", "vision_tower"]
"""Modules of the image encoders. The other modules of ``models.vision`` read images, and need no network."""

# Package or module -> what of ours it may import besides itself. The longest name that matches a module decides. Names
# below ``chairlift`` are written without it.
ALLOWED: dict[str, list[str]] = {
    "errors": [],
    "version": [],
    "base": ["errors"],
    "config": ["errors", "base", "text.tool_calls.formats"],
    "core": ["errors", "config", "base"],
    "core.plugins": ["errors", "base", "core.request", "core.scheduler", "core.kv_cache.eviction"],
    "text": ["errors", "config", "base", "models.formats.gguf"],
    "text.grammar.lark": ["errors"],
    "text.grammar.strings": ["errors"],
    "text.tool_calls": ["errors", "base", "text.grammar.lark", "text.grammar.strings"],
    "kernels": ["errors", "base"],
    "executor.sampling": ["errors", "base"],
    "models": ["errors", "config", "base", "executor.sampling.apart", "kernels"],
    "models.formats.gguf": ["errors", "base"],
    "models.formats.quantize": ["errors", "base", "kernels", "models", "text.tokenizer"],
    "models.vision": ["errors", "base"],
    **{f"models.vision.{name}": ["errors", "config", "base", "kernels", "models"] for name in TOWERS},
    "lora": ["errors", "base", "kernels", "models"],
    "executor.executor": ["config", "base", "core.scheduler.output"],
    "executor": [
        *("errors", "config", "base", "core.request", "core.scheduler.output", "core.spec_decode.upkeep"),
        *("executor.sampling", "kernels", "lora", "models"),
    ],
    "metrics": ["errors", "config", "base"],
    "engine": [
        *("errors", "config", "base", "core", "executor.executor", "metrics.stats", "models.vision"),
        *("text.grammar", "text.tokenizer"),
    ],
    "engine.process.engine_process": [
        *("errors", "config", "base", "engine", "loading", "text.grammar", "text.tokenizer"),
    ],
    "loading": [
        *("errors", "version", "config", "base", "core.scheduler.cost_model", "engine", "executor", "kernels"),
        *("models", "text.tokenizer"),
    ],
    "llm": [
        *("errors", "config", "base", "engine", "loading", "models.vision", "text.tokenizer", "text.tool_calls"),
    ],
    "async_llm": ["errors", "config", "base", "engine", "loading"],
    "fleet": ["errors", "base", "core.request", "core.scheduler"],
    **{
        f"fleet.{name}": [
            *("errors", "config", "base", "core.request", "core.scheduler", "engine", "fleet", "metrics.stats"),
        ]
        for name in ("fleet", "fleet_adapters", "job", "jobs", "member", "members", "moves", "scaler")
    },
    "fleet.prompt_keys": ["errors", "config", "base", "core.rows", "engine", "fleet"],
    "fleet.fleet_scaling": ["errors", "fleet", "metrics.stats"],
    "fleet.local": [
        "errors",
        "config",
        "base.processors",
        "engine.process.process_client",
        "fleet",
        "kernels.control_group",
    ],
    "fleet.models.catalog": ["errors", "config", "base"],
    "fleet.models.turnstile": ["base.processors", "engine", "kernels.control_group"],
    "fleet.node": [
        *("errors", "version", "engine.process.process_client", "fleet.local", "kernels.control_group"),
    ],
    "fleet.ray": ["errors", "version", "config", "engine.process.process_client", "fleet"],
    "server": [
        *("errors", "version", "config", "base", "engine", "fleet", "loading", "metrics", "models.vision"),
        *("models.hf_config", "text.tokenizer", "text.tool_calls"),
    ],
    "server.openai.batches.lines": ["errors"],
    "server.openai.batches.records": ["errors"],
    "server.openai.batches.store": ["errors", "base.locked_database", "server.openai.batches"],
    "cli": [
        *("", "errors", "version", "config", "base", "core", "engine", "executor", "kernels", "llm", "loading"),
        *("models", "server", "text.tokenizer", "text.tool_calls"),
    ],
    "__main__": ["cli"],
    "": ["errors", "version", "config", "base", "async_llm", "llm"],  # chairlift/__init__.py
    "chairlift_lab": [],
    "chairlift_lab.replay": [
        *("errors", "config", "base", "core", "engine", "executor.executor", "fleet", "models.hf_config"),
        "models.model_files",
    ],
    "chairlift_lab.workload": ["errors", "base", "chairlift_lab.replay.traced_request"],
    "chairlift_lab.bench": [
        *("errors", "config", "base", "chairlift_lab.replay", "chairlift_lab.workload", "core.scheduler.cost_model"),
        *("engine", "executor", "kernels", "llm", "loading", "models"),
    ],
    "chairlift_lab.laboratory": [
        *("", "errors", "config", "base", "chairlift_lab.bench", "chairlift_lab.replay", "chairlift_lab.workload"),
        *("core", "engine"),
    ],
    "chairlift_lab.fitting": [
        *("errors", "config", "core.scheduler.cost_model", "chairlift_lab.bench.report", "chairlift_lab.replay"),
    ],
    "chairlift_lab.sim": [
        *("errors", "config", "base", "core", "engine", "executor", "models.hashlm", "models.vision"),
        *("text.grammar", "text.tokenizer"),
    ],
    "chairlift_lab.cli": [
        *("", "errors", "config", "base", "chairlift_lab", "cli", "core", "engine", "executor", "kernels", "llm"),
        *("loading", "models", "server", "text.tokenizer"),
    ],
    "chairlift_train": ["errors", "base", "kernels", "lora", "models", "text.tokenizer"],
    "chairlift_train.exact": ["errors", "config", "chairlift_train", "kernels", "lora", "models"],
    "chairlift_train.engine_pass": ["errors", "config", "base", "executor", "kernels", "models"],
    "chairlift_train.rollout": ["errors", "base", "chairlift_train", "llm"],
    "chairlift_train.service": [
        "errors",
        "config",
        "base",
        "chairlift_train",
        "engine",
        "kernels",
        "lora",
        "metrics.stats",
        "models",
        "server",
    ],
    "chairlift_train.service.log": ["errors", "base.locked_database", "chairlift_train.service.compute.calls"],
    "chairlift_train.service.schedule": ["errors"],
    "chairlift_train.service.compute": ["errors", "config", "chairlift_train", "kernels", "lora", "models"],
    "chairlift_train.cli": ["", "errors", "config", "base", "chairlift_train", "cli", "llm"],
}
OURS = {package.name for package in PACKAGES}
BRAIN_MODULES = ("chairlift.core.scheduler", "chairlift.core.kv_cache")
PLAIN_MODULES = (
    *("chairlift.config", "chairlift.core", "chairlift.errors"),
    *(
        f"chairlift.base.{name}"
        for name in (
            *("lora_request", "outputs", "presets", "sampling_params", "service_class", "structured_outputs"),
            "thinking",
        )
    ),
)
FOREIGN_TO_THE_BRAIN = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "random",
    "secrets",
    "threading",
    "time",
    "datetime",
}


def short(module: str) -> str:
    return "" if module == "chairlift" else module.removeprefix("chairlift.")


def within(module: str, package: str) -> bool:
    return module == package or (bool(package) and module.startswith(f"{package}."))


def rule_for(module: str) -> str:
    return max((name for name in ALLOWED if within(short(module), name)), key=len)


def ours() -> Iterator[tuple[str, int, str]]:
    for module in modules():
        for line, name in imports(module):
            if name.split(".")[0] in OURS:
                yield module, line, name


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_has_a_rule(module: str) -> None:
    assert any(within(short(module), name) for name in ALLOWED), f"say in ALLOWED what {module} may import"


def test_imports_point_down_only() -> None:
    wrong = []
    for module, line, name in ours():
        rule = rule_for(module)
        if not any(within(short(name), allowed) for allowed in [rule, *ALLOWED[rule]]):
            wrong.append(f"{module}:{line} imports {name}")
    assert not wrong


def test_the_rules_have_no_circle() -> None:
    """A table that allows a circle would enforce nothing."""
    for start in ALLOWED:
        reached: set[str] = set()
        todo = list(ALLOWED[start])
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += ALLOWED[rule_for(name)]
        assert start not in reached, f"{start} may import itself by way of others"


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith((*BRAIN_MODULES, *PLAIN_MODULES))])
def test_the_brain_is_standard_library_only(module: str) -> None:
    foreign = {name for _, name in imports(module) if name.split(".")[0] not in OURS}
    assert {name.split(".")[0] for name in foreign} <= sys.stdlib_module_names
    if module.startswith(BRAIN_MODULES):
        assert not {name.split(".")[0] for name in foreign} & FOREIGN_TO_THE_BRAIN


@pytest.mark.parametrize(
    "module",
    [
        "chairlift",
        "chairlift.text.tokenizer",
        "chairlift_lab.sim",
        "chairlift.engine.engine",
        "chairlift.llm",
        "chairlift.async_llm",
    ],
)
def test_import_is_light(module: str) -> None:
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    command = [sys.executable, "-c", f"import sys, {module}; print({heavy})"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("module", sorted(modules()))
def test_nothing_runs_what_it_reads(module: str) -> None:
    assert not {name.split(".")[0] for _, name in imports(module)} & UNSAFE_MODULES
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_CALLS, f"{module}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            assert (owner, node.func.attr) not in {("torch", "load"), ("numpy", "load"), ("np", "load")}
            assert (owner, node.func.attr) not in {("yaml", "load"), ("os", "system"), ("yaml", "unsafe_load")}


@pytest.mark.parametrize("module", sorted(modules()))
def test_validation_never_uses_assert(module: str) -> None:
    """``python -O`` removes assert statements."""
    assert not [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("module", sorted(modules()))
def test_templates_run_in_the_sandbox(module: str) -> None:
    for node in ast.walk(tree(module)):
        named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert named not in {"Environment", "NativeEnvironment", "SandboxedEnvironment"}, (
            "use ImmutableSandboxedEnvironment"
        )


def test_the_engine_names_no_module_of_the_laboratory_or_the_training_half() -> None:
    """Their commands are found by the names in one table, and nothing else of the engine knows them."""
    table = "chairlift.cli.commands"
    named = [
        f"{module}:{node.lineno} {node.value}"
        for module in modules()
        if module.split(".")[0] == "chairlift" and module != table
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith(("chairlift_lab.", "chairlift_train."))
    ]
    assert not named


def test_serving_needs_no_laboratory_no_training_and_no_quantising() -> None:
    code = (
        "import sys, chairlift, chairlift.cli.serve, chairlift.server.http.lifecycle\n"
        "import chairlift.engine.process.engine_process\n"
        "chairlift.LLM, chairlift.AsyncLLM\n"
        "aside = ('chairlift_lab', 'chairlift_train', 'chairlift.models.formats.quantize')\n"
        "print([name for name in sys.modules if name.startswith(aside)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_of_dependencies_names_the_folders_that_import_them() -> None:
    """The last column of its first table. ``cli`` of the other packages may be named by their package."""
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").split("\n\n")
    rows = [
        line.strip("|").split("|") for line in next(part for part in page if part.startswith("| Package |")).split("\n")
    ]
    wrong = []
    for row in rows[2:]:
        package = "yaml" if "pyyaml" in row[0] else re.findall(r"[\w-]+", row[0])[0].replace("-", "_")
        named = [re.split(r"[/.]", place.removesuffix(".py")) for place in re.findall(r"`([\w/.]+)`", row[2])]
        named = [[*(() if place[0].startswith("chairlift_") else ("chairlift",)), *place] for place in named]
        importers = [
            module.split(".")
            for module in modules()
            if any(name.split(".")[0] == package for _, name in imports(module))
        ]
        for module in importers:
            if not any(module[: len(place)] == place for place in named) and module[1] != "cli":
                wrong.append(f"{package}: {'.'.join(module)} is not named")
        for place in named:
            if importers and not any(module[: len(place)] == place for module in importers) and place[-1] != "cli":
                wrong.append(f"{package}: {'.'.join(place)} does not import it")
    assert not wrong
