"""Tables of known machines and models, and the cost of a model's steps on a machine.

Bandwidth and arithmetic speed are the vendors' values for dense bfloat16. The fractions of them that kernels reach, and
the time between steps, are assumptions. So all results from these tables are called *modelled, unvalidated* wherever
they are printed. A cost model that is fitted to real steps is not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.base.writing import replacing
from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.errors import ConfigError
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.model_files import read_config

__all__ = [
    "MACHINES",
    "MODELLED",
    "MODELS",
    "Deployment",
    "Machine",
    "ModelShape",
    "check_undivided",
    "deploy",
    "machine_from_name",
    "read_deployment",
    "shape_from_name",
    "write_deployment",
]

MODELLED: Final = "modelled, unvalidated"


_LINK: Final = 60e9
"""Assumed bytes per second between two sockets: half of what the data sheets of three or four links promise."""
_MEETING_SECONDS: Final = 3e-6
"""Assumed time in which processes on several sockets meet. On one socket it is about 1 us."""
_MEETINGS: Final = 4
"""Number of times per layer that the processes of a divided model meet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Speed and memory of a GPU, or of a CPU socket whose memory channels are all in use."""

    name: str
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    operations: float
    """Dense bfloat16 operations per second."""
    memory: float
    """Memory in bytes."""
    bandwidth_share: float
    """Fraction of ``bandwidth`` that kernels reach when they read weights and KV."""
    operation_share: float
    """Fraction of ``operations`` that large matrix multiplications reach."""
    step_seconds: float
    """Fixed time per step in seconds, for launches, scheduling and so on."""
    kv_share: float
    """Fraction of ``memory`` that is available for weights and KV cache together."""
    reads_shared_once: bool
    """Whether the attention kernels read the KV of a shared prefix once per step for all decode rows."""
    link: float = 0.0
    """Bytes per second that a CPU socket reads from the memory of the other sockets of its machine. 0: a GPU, on which
    models are not divided."""


def _gpu(name: str, terabytes: float, teraflops: float, gigabytes: float) -> Machine:
    return Machine(name, terabytes * 1e12, teraflops * 1e12, gigabytes * 1e9, 0.8, 0.55, 0.0008, 0.9, False)


def _cpu(name: str, cores: int, gigahertz: float, per_cycle: int, gigabytes_per_second: float) -> Machine:
    """A CPU. ``per_cycle`` is the number of bfloat16 operations per core and cycle. ``gigahertz`` is the base clock,
    which matrix multiplications can sustain."""
    operations = cores * gigahertz * 1e9 * per_cycle
    return Machine(name, gigabytes_per_second * 1e9, operations, 256e9, 0.75, 0.5, 0.0005, 0.5, True, _LINK)


MACHINES: Final = {
    machine.name: machine
    for machine in (
        _gpu("h100-sxm", 3.35, 989, 80),
        _gpu("h100-pcie", 2.0, 756, 80),
        _gpu("h200", 4.8, 989, 141),
        _gpu("b200", 8.0, 2250, 180),
        _gpu("mi300x", 5.3, 1307, 192),
        _gpu("a100-80gb", 2.039, 312, 80),
        _gpu("a100-40gb", 1.555, 312, 40),
        _gpu("l40s", 0.864, 362, 48),
        _gpu("l4", 0.3, 121, 24),
        _gpu("a10", 0.6, 125, 24),
        _gpu("rtx-5090", 1.792, 209, 32),
        _gpu("rtx-4090", 1.008, 165, 24),
        _gpu("rtx-3090", 0.936, 71, 24),
        # Operations per core and cycle: 2,048 with AMX, 64 with AVX-512 BF16 on Zen 4 and 128 on Zen 5. Neoverse runs
        # four BFMMLA instructions of 32 operations.
        _cpu("sapphire-rapids-8480", 56, 2.0, 2048, 307.2),
        _cpu("emerald-rapids-8592", 64, 1.9, 2048, 358.4),
        _cpu("granite-rapids-6980p", 128, 2.0, 2048, 844.8),
        _cpu("genoa-9654", 96, 2.4, 64, 460.8),
        _cpu("turin-9755", 128, 2.7, 128, 576.0),
        _cpu("graviton4", 96, 2.8, 128, 537.6),
        _cpu("ryzen-9950x", 16, 4.3, 128, 89.6),
    )
}
"""Name of a machine -> its speed and memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of weights of a decoder model, and sizes of the K and V of a token. Weights and KV have ``itemsize``
    bytes."""

    name: str
    body_params: int
    """Number of weights that are used for every token: all weights except the embedding and the output head."""
    head_params: int
    """Number of weights of the output head, which is used only for sampled tokens."""
    embedding_params: int
    """Number of weights of the embedding, or 0 if it is also the output head. A step reads only a few of its rows."""
    kv_width: int
    """Number of elements of K (or of V) per token, in all layers together."""
    q_width: int
    """Number of elements of the queries per token, in all layers together."""
    max_model_len: int
    layers: int = 1
    kv_heads: int = 0
    """Number of KV heads; 0 if it is not known."""
    exchanged_width: int = 0
    """Number of elements per token, in all layers together, that the processes of a divided model read from each other:
    results of attention, of two layers of the hidden size, and of the MLP's first layer."""
    itemsize: int = 2
    unchosen_params: int = 0
    """Number of weights of the experts that a token does not use. (The experts that it uses are in
    :attr:`body_params`.) A step is assumed to read all of them, which is true if the batch is a few times the number of
    experts."""

    @classmethod
    def of(cls, name: str, network: NetworkConfig, itemsize: int = 2) -> ModelShape:
        """Shape of a model from its configuration. Sliding windows are ignored: every layer has full attention."""
        hidden = network.hidden_size
        layers = network.num_hidden_layers
        q = network.num_attention_heads * network.head_dim
        kv = network.num_key_value_heads * network.head_dim
        attention = hidden * (q + 2 * kv) + q * hidden
        head = hidden * network.vocab_size
        dense = 3 * hidden * network.intermediate_size * layers
        inner = network.intermediate_size * layers
        apart = 0
        if (experts := network.experts) is not None:
            one = 3 * hidden * experts.intermediate_size
            count = experts.routing.num_experts
            with_experts = sum(experts.layers)
            chosen = experts.routing.top_k
            every = hidden * (3 * experts.shared_size + count) + chosen * one
            dense = dense // layers * (layers - with_experts) + every * with_experts
            apart = (count - chosen) * one * with_experts
            each = experts.shared_size + chosen * experts.intermediate_size
            inner = inner // layers * (layers - with_experts) + each * with_experts
        return cls(
            name=name,
            body_params=attention * layers + dense,
            unchosen_params=apart,
            head_params=head,
            embedding_params=0 if network.tie_word_embeddings else head,
            kv_width=kv * layers,
            q_width=q * layers,
            max_model_len=network.max_model_len,
            layers=layers,
            kv_heads=network.num_key_value_heads,
            exchanged_width=layers * (q + 2 * hidden) + inner,
            itemsize=itemsize,
        )

    @property
    def weight_bytes(self) -> int:
        """Size of all weights in bytes."""
        params = self.body_params + self.unchosen_params + self.head_params + self.embedding_params
        return params * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Size of K and V in bytes per token."""
        return 2 * self.kv_width * self.itemsize

    def on(self, machine: Machine, processes: int = 1) -> Roofline:
        """Predicted costs of this model's steps on a machine, or divided among ``processes``, each on such a CPU
        socket. Each then reads its part of the weights and of the KV, and the parts of the others' results over the
        link."""
        bandwidth = machine.bandwidth * machine.bandwidth_share * processes
        operations = machine.operations * machine.operation_share * processes
        others = 0.0 if processes == 1 else self.exchanged_width * self.itemsize * (processes - 1) / processes
        meetings = 0 if processes == 1 else _MEETINGS * self.layers
        params = self.body_params + self.head_params
        pair_seconds = 4 * self.q_width / operations
        context_seconds = max(self.kv_bytes / bandwidth, pair_seconds)
        return Roofline(
            weight_seconds=(params + self.unchosen_params) * self.itemsize / bandwidth,
            token_seconds=2 * params / operations + (others / machine.link if others else 0.0),
            prompt_share=self.body_params / params,
            context_seconds=context_seconds,
            shared_share=pair_seconds / context_seconds,
            pair_seconds=pair_seconds,
            step_seconds=machine.step_seconds + meetings * _MEETING_SECONDS,
            adapter_byte_seconds=1 / bandwidth,
        )


def _known(
    name: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, tied: bool, length: int
) -> ModelShape:
    """Shape of a known model. ``heads`` is (number of query heads, number of KV heads, size of a head)."""
    q = heads[0] * heads[2]
    kv = heads[1] * heads[2]
    head = hidden * vocab
    return ModelShape(
        name=name,
        body_params=layers * (hidden * (2 * q + 2 * kv) + 3 * hidden * inner),
        head_params=head,
        embedding_params=0 if tied else head,
        kv_width=kv * layers,
        q_width=q * layers,
        max_model_len=length,
        layers=layers,
        kv_heads=heads[1],
        exchanged_width=layers * (q + 2 * hidden + inner),
    )


MODELS: Final = {
    shape.name: shape
    for shape in (
        _known("smollm-135m", 576, 1536, 30, (9, 3, 64), 49_152, True, 2048),
        _known("qwen2.5-0.5b", 896, 4864, 24, (14, 2, 64), 151_936, True, 32_768),
        _known("qwen3-0.6b", 1024, 3072, 28, (16, 8, 128), 151_936, True, 40_960),
        _known("llama-3.2-1b", 2048, 8192, 16, (32, 8, 64), 128_256, True, 131_072),
        _known("qwen2.5-7b", 3584, 18_944, 28, (28, 4, 128), 152_064, False, 32_768),
        _known("mistral-7b", 4096, 14_336, 32, (32, 8, 128), 32_768, False, 32_768),
        _known("llama-3-8b", 4096, 14_336, 32, (32, 8, 128), 128_256, False, 8192),
        _known("llama-3.1-8b", 4096, 14_336, 32, (32, 8, 128), 128_256, False, 131_072),
        _known("qwen2.5-32b", 5120, 27_648, 64, (40, 8, 128), 152_064, False, 32_768),
        _known("llama-3-70b", 8192, 28_672, 80, (64, 8, 128), 128_256, False, 8192),
    )
}
"""Name of a model -> its shape in bfloat16."""


def shape_from_name(name: str) -> ModelShape:
    """Shape of a known model, or of the model in a directory with a config.json.

    Raises ConfigError for an unknown name, and ModelLoadError for an invalid config.json.
    """
    if name in MODELS:
        return MODELS[name]
    if (Path(name) / "config.json").is_file():
        network = read_config(Path(name))
        return ModelShape.of(name, network, 4 if network.dtype == "float32" else 2)
    raise ConfigError(f"model must be a directory with a config.json or one of {', '.join(MODELS)}; got {name!r}")


# --- a model on a machine --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on a machine, described for a simulation by a cost model, sizes and limits."""

    machine: str
    model: str
    cost: CostModel
    kv_bytes_per_token: int
    kv_memory_bytes: int
    max_model_len: int
    validity: str = MODELLED
    """``modelled, unvalidated``, or how well the cost model fits real steps."""
    reads_shared_once: bool = False
    """Whether decode rows that share a prefix read its KV together, once per step."""
    capture_sizes: tuple[int, ...] = ()
    """Numbers of tokens to which the machine rounds a step up, ascending: the sizes of its CUDA graphs. Empty: steps
    have no padding."""
    request_seconds: float = 0.0
    """Seconds between sending a request and its arrival in the engine, for client, network and front end."""

    def to_dict(self) -> dict[str, Any]:
        """The deployment as data for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"cost": self.cost.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Deployment:
        """Create a deployment from the data of :meth:`to_dict`. Raises ConfigError for other data."""
        texts = ("machine", "model", "validity")
        numbers = ("kv_bytes_per_token", "kv_memory_bytes", "max_model_len")
        for name in texts + numbers:
            value = fields.get(name)
            if type(value) is not (str if name in texts else int) or (name in numbers and not 0 < int(value) < 2**60):
                raise ConfigError(
                    f"this is not a cost model: {name} is {value!r:.40}; make one with chairlift sim --fit"
                )
        sizes = fields.get("capture_sizes", ())
        if not isinstance(sizes, (list, tuple)) or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"this is not a cost model: capture_sizes is {sizes!r:.40}; give whole numbers above 0")
        delay = fields.get("request_seconds", 0.0)
        if type(delay) not in (int, float) or not 0 <= delay < 1e6:
            raise ConfigError(f"this is not a cost model: request_seconds is {delay!r:.40}; give seconds, 0 or more")
        return cls(
            cost=CostModel.from_dict(fields.get("cost") or {}),
            reads_shared_once=fields.get("reads_shared_once") is True,  # older versions read each row separately
            capture_sizes=tuple(sorted(sizes)),
            request_seconds=float(delay),
            **{name: fields[name] for name in texts + numbers},
        )


def deploy(machine_name: str, shape: ModelShape, processes: int = 1) -> Deployment:
    """Deployment of a model on a machine of :data:`MACHINES`, or on ``processes`` such sockets together
    (``tensor_parallel_size``). Raises ConfigError for an unknown machine, for machines with too little memory, and for
    a model that cannot be divided so."""
    machine = MACHINES.get(machine_name)
    if machine is None:
        raise ConfigError(f"machine must be one of {', '.join(MACHINES)}, or a machine file; got {machine_name!r}")
    if processes > 1 and not machine.link:
        raise ConfigError(f"tensor_parallel_size is {processes}, but {machine.name} is a GPU; only CPUs divide a model")
    if 0 < shape.kv_heads < processes:
        raise ConfigError(f"tensor_parallel_size is {processes}, but {shape.name} has {shape.kv_heads} KV heads")
    memory = machine.memory * machine.kv_share * processes
    name = machine.name if processes == 1 else f"{processes} x {machine.name} as one engine"
    room = int(memory) - shape.weight_bytes
    if room < shape.kv_bytes * 1024:
        raise ConfigError(
            f"{shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights, but {name} has"
            f" {memory / 1e9:.0f} GB for weights and KV; take a larger machine"
        )
    return Deployment(
        machine=name,
        model=shape.name,
        cost=CostModel(shape.on(machine, processes)),
        kv_bytes_per_token=shape.kv_bytes,
        kv_memory_bytes=room,
        max_model_len=shape.max_model_len,
        reads_shared_once=machine.reads_shared_once,
    )


def machine_from_name(name: str, model: str, processes: int = 1) -> Deployment:
    """Deployment of ``model`` on a machine of :data:`MACHINES` or on several, as in :func:`deploy`, or the deployment
    in the file ``name``, which already has its model. Raises ConfigError."""
    if name not in MACHINES and Path(name).is_file():
        check_undivided(processes, f"the machine file {name}")
        return read_deployment(Path(name))
    return deploy(name, shape_from_name(model), processes)


def check_undivided(processes: int, source: str) -> None:
    """Raise ConfigError if a model is to be divided whose costs were measured: they are those of the processes on which
    they were measured."""
    if processes > 1:
        raise ConfigError(
            f"tensor_parallel_size is {processes}, but {source} has costs that were measured, on as many processes as"
            " there were then; leave it out, or use a machine of the table"
        )


def read_deployment(path: Path) -> Deployment:
    """Read a file of :func:`write_deployment`. Raises ConfigError if it cannot be read or is not such a file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cost model {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"the cost model {path} is not valid JSON; make one with chairlift sim --fit") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a cost model; make one with chairlift sim --fit")
    return Deployment.from_dict(fields)


def write_deployment(path: Path, deployment: Deployment) -> None:
    """Write a deployment with its cost model as JSON."""
    with replacing(path) as file:
        file.write(json.dumps(deployment.to_dict()) + "\n")
