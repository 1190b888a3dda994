"""Imports point down only, the brain knows no tensors, and nothing in the package can run what it reads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.source import imports, modules, tree

# Package or module -> what of ours it may import besides itself. The longest name that matches a module decides.
PLAIN = [
    *("errors", "config", "lora_request", "outputs", "sampling_params", "service_class", "structured_outputs"),
    *("presets", "thinking"),
]
BRAIN = ["request", "kv_cache", "scheduler"]
ALLOWED: dict[str, list[str]] = {
    "errors": [],
    "cache_key": [],
    "json_text": [],
    "outputs": [],
    "parent": [],
    "timed_socket": [],
    "workers": ["errors", "parent"],
    "step_batch": [],
    "config": [
        *("errors", "foreign_names", "presets", "quantities", "rerankers", "service_class"),
        *("tool_calls.formats", "vllm_names"),
    ],
    "rerankers": [],
    "lora_request": ["errors"],
    "service_class": ["errors"],
    "structured_outputs": ["errors"],
    "sampling_params": ["errors", "structured_outputs", "thinking"],
    "thinking": ["errors"],
    "grammar": ["errors", "cache_key", "structured_outputs", "tokenizer", "workers"],
    "vision": ["errors", "cache_key", "timed_socket", "workers"],
    "vision.spans": [],
    "vision.refusals": [],
    "request": ["errors", "outputs", "kv_cache.prefix_node", "vision.spans"],
    "kv_cache.prefix_node": [],
    "kv_cache": ["errors", "cache_key", "config", "request", "vision.spans"],
    "scheduler": ["errors", "config", "outputs", "request", "kv_cache", "service_class", "vision.spans"],
    "spec_decode": ["errors", "config", "request", "scheduler"],
    "spec_decode.upkeep": [],
    "plugins": ["errors", "scheduler"],
    "mistaken_models": ["errors"],
    "quantities": ["errors"],
    "vllm_names": ["errors"],
    "foreign_names": [],
    "presets": ["errors"],
    "gguf": ["errors", "mistaken_models"],
    "tokenizer": [
        *("errors", "config", "gguf", "json_text", "mistaken_models", "tool_calls.formats", "vision.refusals"),
        "workers",
    ],
    "tool_calls": ["errors", "json_text", "structured_outputs"],
    "kernels": ["errors", "step_batch"],
    "sampling": ["errors", "sampling_params", "step_batch"],
    "models": [
        "errors",
        "config",
        "gguf",
        "kernels",
        "mistaken_models",
        "rerankers",
        "sampling.apart",
        "sampling.failures",
        "sampling.row",
        "step_batch",
        "vision",
    ],
    "lora": ["errors", "mistaken_models", "models", "kernels"],
    "executor": [
        "errors",
        "config",
        "request",
        "scheduler.output",
        "lora",
        "models",
        "kernels",
        "sampling",
        "spec_decode.upkeep",
        "step_batch",
        "vision.spans",
    ],
    "executor.executor": ["config", "scheduler.output", "step_batch", "vision.spans"],
    "metrics": ["errors", "config"],
    "engine": [
        *PLAIN,
        *BRAIN,
        "cache_key",
        "executor.executor",
        "grammar",
        "metrics.stats",
        "parent",
        "sampling.failures",
        "sampling.row",
        "sampling.seeds",
        "spec_decode",
        "step_batch",
        "tokenizer",
        "vision",
    ],
    "batches": ["errors"],
    "version": [],
    "loading": [
        *PLAIN,
        "version",
        "engine.info",
        "loading_draft",
        "executor",
        "kernels",
        "models",
        "scheduler.cost_model",
        "tokenizer",
        "vision.processor",
    ],
    "loading_draft": ["errors", "config", "executor", "models"],
    "llm": [*PLAIN, "engine", "loading", "pooled_llm", "pooled_loading", "tokenizer", "tool_calls", "vision"],
    "pooled_llm": ["errors", "outputs", "engine"],
    "pooled_loading": ["errors", "config", "engine", "executor", "loading", "models", "rerankers"],
    "async_llm": [*PLAIN, "engine", "loading", "pooled_llm"],
    "engine_process": ["errors", "config", "engine", "grammar", "loading", "parent", "pooled_loading", "tokenizer"],
    "server": [
        *PLAIN,
        *("version", "batches", "distributed", "engine", "loading", "metrics", "parent", "replay"),
        *("tokenizer", "tool_calls", "vision", "workers"),
    ],
    "writing": ["errors"],
    "distributed": ["errors", "cache_key", "request", "scheduler"],
    "distributed.fleet": [
        *("errors", "config", "distributed", "engine", "metrics.stats", "outputs", "scheduler", "service_class"),
    ],
    "distributed.fleet_scaling": ["errors", "distributed", "metrics.stats"],
    "distributed.local": ["errors", "config", "distributed", "engine.process_client", "kernels.control_group"],
    "distributed.node": [
        *("errors", "distributed.local", "engine.process_client", "kernels.control_group", "version"),
    ],
    "distributed.ray": ["errors", "config", "distributed", "engine.process_client", "version"],
    "replay": [
        *PLAIN,
        "distributed",
        "engine",
        "step_batch",
        "models.hf_config",
        "models.model_files",
        "scheduler",
        "workers",
        "writing",
    ],
    "workbench.workload": ["errors", "replay.traced_request", "writing"],
    "workbench.bench": [
        *PLAIN,
        "engine",
        "executor",
        "kernels",
        "llm",
        "models",
        "replay",
        "scheduler.cost_model",
        "step_batch",
        "workbench.workload",
        "writing",
    ],
    "train": ["errors", "lora", "models", "kernels", "parent", "tokenizer", "writing"],
    "quantize": ["errors", "gguf", "kernels", "models", "tokenizer"],
    "rollout": [*PLAIN, "llm", "train"],
    "workbench.sim": [
        *PLAIN,
        *BRAIN,
        "engine",
        "executor",
        "grammar",
        "models.hashlm",
        "sampling",
        "step_batch",
        "tokenizer",
        "vision",
    ],
    "workbench": [],
    "cli": [
        "quantities",
        "foreign_names",
        "vllm_names",
        *PLAIN,
        *BRAIN,
        "",
        "engine",
        "executor",
        "kernels",
        "llm",
        "loading",
        "pooled_loading",
        "models",
        "quantize",
        "replay",
        "timed_socket",
        "sampling",
        "server",
        "tokenizer",
        "train",
        "version",
        "workbench",
        "writing",
    ],
    "__main__": ["cli"],
    "": [*PLAIN, "async_llm", "llm", "version"],  # chairlift/__init__.py
}
BRAIN_MODULES = ("chairlift.scheduler", "chairlift.kv_cache")
PLAIN_MODULES = tuple(f"chairlift.{name}" for name in [*PLAIN, "request"])
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
    return module.removeprefix("chairlift").removeprefix(".")


def within(module: str, package: str) -> bool:
    return module == package or (bool(package) and module.startswith(f"{package}."))


def rule_for(module: str) -> str:
    return max((name for name in ALLOWED if within(short(module), name)), key=len)


def ours() -> Iterator[tuple[str, int, str]]:
    for module in modules():
        for line, name in imports(module):
            if name.split(".")[0] == "chairlift":
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
    foreign = {name for _, name in imports(module)} - {n for _, n in imports(module) if n.startswith("chairlift")}
    assert {name.split(".")[0] for name in foreign} <= sys.stdlib_module_names
    if module.startswith(BRAIN_MODULES):
        assert not {name.split(".")[0] for name in foreign} & FOREIGN_TO_THE_BRAIN


@pytest.mark.parametrize(
    "module",
    [
        "chairlift",
        "chairlift.tokenizer",
        "chairlift.workbench.sim",
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


def test_serving_needs_no_workbench_no_training_and_no_quantising() -> None:
    code = (
        "import sys, chairlift, chairlift.cli.serve, chairlift.server.lifecycle, chairlift.engine_process\n"
        "chairlift.LLM, chairlift.AsyncLLM\n"
        "aside = tuple(f'chairlift.{name}' for name in ('workbench', 'train', 'quantize'))\n"
        "print([name for name in sys.modules if name.startswith(aside)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
