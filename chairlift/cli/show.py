"""``chairlift show``: what a model is, from its files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.cli.remote_server import RemoteServer, add_url_flag, plain
from chairlift.cli.table import size
from chairlift.config import BUNDLED_MODEL
from chairlift.errors import ChairliftError, ConfigError

if TYPE_CHECKING:
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.hf_config import NetworkConfig

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "show what a model is: family, size, quantisation, context, template, licence"
DESCRIPTION: Final = """Show what a model is: family, parameters, quantisation, context length, chat template, licence.

MODEL is a directory, a GGUF file, or a model that chairlift list lists. Nothing is downloaded, and no weights are
read; chairlift check also loads and tests the model. With --url, a running server describes one of its models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift show``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="(default: the bundled model, or the server's first)")
    parser.add_argument("--template", action="store_true", help="print only the chat template")
    add_url_flag(parser, None, "a running server that has the model")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")


def run(args: argparse.Namespace) -> int:
    """Print the facts. Returns 0, or 1 if the model cannot be loaded."""
    if args.url is not None:
        facts, template = _remote_facts(RemoteServer(args.url, api_key_file=args.api_key_file), args.model)
        problem = None
    else:
        from chairlift.loading.loadable import problem_of

        path = _local_path(args.model)
        template = _template(path)
        facts = {} if args.template else dict(_facts(path, args.model or BUNDLED_MODEL, template))
        problem = None if args.template else problem_of(path)
        facts["loads"] = "yes" if problem is None else f"no: {problem}"
    if args.template:
        if template is None:
            raise ConfigError(f"{args.model or BUNDLED_MODEL} has no chat template")
        print(template)
        return 0
    for name, value in facts.items():
        print(f"{name:14} {value}")
    return 0 if problem is None else 1


def _local_path(name: str | None) -> Path:
    """Directory or GGUF file of a model on this machine. Raises ModelLoadError."""
    import chairlift
    from chairlift.models.hub import parse_hub_id
    from chairlift.models.hub_cache import find_cached, not_cached
    from chairlift.models.loader import resolve_model_dir

    if name in (None, BUNDLED_MODEL):
        return Path(chairlift.__file__).parent / "assets"
    is_here = Path(name).expanduser().exists() or Path(name.rpartition(":")[0] or name).expanduser().is_dir()
    if is_here or parse_hub_id(name) is None:
        return resolve_model_dir(name)
    model = find_cached(name)
    if model is None:
        raise not_cached(name)
    return model.path


def _facts(path: Path, name: str, template: str | None) -> Iterator[tuple[str, str]]:
    """(label, text) of what the files say. What cannot be read is left out."""
    from chairlift.models.description import describe_weights, licence_of, raw_config

    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    yield "model", name
    yield "files", f"{path} ({size(sum(file.stat().st_size for file in files))})"
    raw = raw_config(path)
    network = _network(path)
    family = raw.get("general.architecture") or raw.get("model_type")
    yield "family", str(family or "unknown")
    if network is not None:
        yield "parameters", f"{_count(network):,}"
        yield "weights", describe_weights(path, network.dtype)
        yield "context", f"{network.max_model_len:,} tokens"
    yield "chat template", _describe_template(template)
    yield "licence", licence_of(path) or "not said in the files"


def _network(path: Path) -> NetworkConfig | TransformersConfig | None:
    """Shape of the network; None if its files cannot be read, for the reason that ``loads`` gives."""
    from chairlift.models.model_files import read_network
    from chairlift.models.pooling import pools, read_pooled_config

    try:
        if pools(path):
            network: Any = read_pooled_config(path).network
            return network if hasattr(network, "max_model_len") else None
        return read_network(path, "auto", "auto")
    except ChairliftError:
        return None


def _count(network: NetworkConfig | TransformersConfig) -> int:
    """Number of parameters."""
    import torch

    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.fallback.config import TransformersConfig

    if isinstance(network, TransformersConfig):
        from chairlift.models.fallback.loading import count_parameters

        return count_parameters(network)
    with torch.device("meta"):  # shapes only
        model = CausalLM(network)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _template(path: Path) -> str | None:
    from chairlift.text.tokenizer.tokenizer import Tokenizer

    try:
        return Tokenizer.from_dir(path).chat_template
    except ChairliftError:
        return None


def _describe_template(template: str | None) -> str:
    from chairlift.text.tool_calls import reasoning_format_of, tool_format_of

    if template is None:
        return "none"
    tools = "tools" in template and tool_format_of(template) is not None
    thinks = reasoning_format_of(template) is not None
    return "yes" + ", with tools" * tools + ", with thinking" * thinks


def _remote_facts(server: RemoteServer, name: str | None) -> tuple[dict[str, str], str | None]:
    """Facts from a server's /api/show, and the chat template."""
    if name is None:
        listed = server.ask("GET", "/v1/models").get("data")
        name = str(listed[0]["id"]) if isinstance(listed, list) and listed else "default"
    answer = server.ask("POST", "/api/show", {"model": name})
    details = answer.get("details") or {}
    info = answer.get("model_info") or {}
    facts = {
        "model": f"{name} at {server.url}",
        "family": details.get("family"),
        "parameters": f"{info['general.parameter_count']:,}" if info.get("general.parameter_count") else None,
        "weights": details.get("quantization_level"),
        "context": next((f"{value:,} tokens" for key, value in info.items() if key.endswith(".context_length")), None),
        "chat template": _describe_template(answer.get("template") or None),
        "can do": ", ".join(answer.get("capabilities") or ()),
    }
    return {label: plain(str(value)) for label, value in facts.items() if value}, answer.get("template") or None
