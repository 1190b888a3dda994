"""A complete training run (``chairlift train``): from settings to a checkpoint that can be served."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from chairlift.base.plugins import load_plugin
from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.lora.sites import sites_in
from chairlift.lora.trainable import TrainableAdapter, target_parts
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig, parse_config, read_json
from chairlift.models.loader import load_model
from chairlift.models.registry import FAMILIES
from chairlift_train.balance import Cost
from chairlift_train.board import Board
from chairlift_train.checkpoint import CheckpointStore, ModelFiles, load_state, random_state, set_random_state
from chairlift_train.config import DataSettings, DriftSettings, LoraSettings, TrainConfig
from chairlift_train.drift import DriftSampler
from chairlift_train.encoder import Encode, Encoder, fitting
from chairlift_train.evaluation import Evaluation, EvaluationResult
from chairlift_train.forward import native_network
from chairlift_train.heads.make import check_heads, make_heads
from chairlift_train.heads.training import HeadsNetwork, HeadsTrainer
from chairlift_train.hf_network import TransformersNetwork, TransformersShape, load_for_training, read_shape
from chairlift_train.networks import Network
from chairlift_train.parallel import Ranks, process_group, world_size
from chairlift_train.record_files import expand, open_file
from chairlift_train.several_adapters import adapter_field, naming
from chairlift_train.sharding import together
from chairlift_train.sources import FollowedLines, Notes, RecordSource
from chairlift_train.stream import PackStream
from chairlift_train.stream_stats import Cut
from chairlift_train.trainer import Trainer, TrainingStepResult

__all__ = ["Outcome", "Prepared", "device_of", "prepare", "train"]

_POLL_SECONDS = 0.2


class _Stopped(Exception):
    """Raised when a stop was requested while a source waits for data."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a training run."""

    directory: Path
    """Directory of the last checkpoint."""
    steps: int
    """Number of steps, including the steps before a resume."""
    finished: bool
    """Whether the schedule or the data has ended. False after an interruption."""
    last: TrainingStepResult | None
    """Result of the last step of this process. None if this process ran no step."""
    skipped: int = 0
    """Number of skipped records. A record is counted once, even if the files are read several times."""
    best: tuple[int, float] | None = None
    """(step, evaluation loss) of the best checkpoint. None without ``data.eval_files``."""
    notes: Notes = dataclasses.field(default_factory=Notes)
    """Notes on records (:class:`~chairlift_train.encoder.Encoded`)."""
    cut: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    """Source -> counts of the tokens that ``packing.overflow`` removed in the whole run."""
    dropped: int = 0
    """Number of sequences that ``packing.overflow: drop`` left out in the whole run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose settings and files have been checked."""

    config: TrainConfig
    store: CheckpointStore
    network: NetworkConfig | TransformersShape
    files: ModelFiles
    resume_from: Path | None
    open_sources: Mapping[str, Callable[[Callable[[], bool]], Any]]
    """Name of a source -> function that opens it. The argument of the function is called when there is no data to read,
    and returns False to end the source."""
    open_evaluation: Mapping[str, Callable[[], Any]]
    """Name of a source of evaluation data -> function that opens it from its beginning."""
    meaning: Mapping[str, Any]
    """Settings of the data that must be the same when the run is resumed, as plain data."""
    examples: Iterator[Mapping[str, Any]]
    """Every training example of ``data.files`` once, in order. The files are read when it is iterated."""


def prepare(
    config: TrainConfig, *, resume: str = "auto", ranks: int = 1, on_save: Callable[[str], None] = lambda _point: None
) -> Prepared:
    """Check settings and files before the training starts. Nothing is written.

    Args:
        config: Settings of the run.
        resume: ``auto`` (from the newest checkpoint in the output directory, if any), ``never``, or the directory of a
            checkpoint.
        ranks: Number of processes that will train.
        on_save: Argument ``at`` of the :class:`~chairlift_train.checkpoint.CheckpointStore`.

    Raises ConfigError and ModelLoadError.
    """
    if config.output is None:
        raise ConfigError("there is no output directory; set output in the configuration, or give --output DIR")
    root = Path(config.output)
    place = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"output {root} is not a directory that can be written ({place}); choose another")
    store = CheckpointStore(root, keep=config.checkpoints.keep, at=on_save)
    resume_from = _resume_from(store, resume)
    network, files = _model_files(config)
    if config.lora is not None:
        if not isinstance(network, NetworkConfig):
            raise ConfigError(
                f"lora is for native models (docs/models.md), and {network.model_type} is one of transformers; train"
                " the whole model, or use PEFT with the Trainer (docs/training.md)"
            )
        for settings in (config.lora, *config.lora.by_name.values()):
            target_parts(sites_in(network), settings.targets)  # for its checks alone
    if config.heads is not None:
        check_heads(config.heads, network)
    tokenizer_dir = files.tokenizer_dir if config.data.files or config.data.eval_files else None
    encoder = _encoder(config.data, tokenizer_dir)
    if encoder.vocab_size > network.vocab_size:
        raise ConfigError(
            f"the tokenizer has {encoder.vocab_size} tokens, but the model only {network.vocab_size} "
            "(vocab_size); use the tokenizer that belongs to the model, or a larger vocab_size"
        )
    device_of(config)
    _check_sharding(config)
    _stream(config, network, [[0, 0]], Ranks(0, ranks))  # for its checks alone
    most = config.packing.capacity if config.packing.overflow == "error" else None
    encode = fitting(encoder.examples, network.vocab_size, most)
    openers = _source_openers(config, encode)
    _mixed(config, {name: [[0]] for name in openers})  # likewise
    evaluated = _evaluation_openers(config, encode)
    meaning = _meaning(config, encoder)
    return Prepared(config, store, network, files, resume_from, openers, evaluated, meaning, _once(config, encode))


def _meaning(config: TrainConfig, encoder: Encoder) -> dict[str, Any]:
    """Settings that determine the targets of the data. The number of epochs and the treatment of errors may change."""
    data = config.data
    if data.source is not None:
        return {"source": data.source, "options": dict(data.options)}
    return {**encoder.meaning, "access": data.access}


def _check_meaning(meaning: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run of a checkpoint's ``state`` gave the data another meaning."""
    # Earlier releases stored the configuration alone, in which files are named and not described by checksums.
    saved = state.get("data") or (state.get("config") or {}).get("data") or {}
    described = ("tokenizer", "chat_template") if "data" not in state else ()
    changed = [
        f"data.{name} was {saved[name]!r:.200} and is {value!r:.200}".replace("data.tokenizer", "the tokenizer")
        for name, value in meaning.items()
        if name in saved and name not in described and saved[name] != value
    ]
    if changed or ("data" in state and set(saved) != set(meaning)):
        raise ConfigError(
            f"the data would have another meaning: {'; '.join(changed) or 'it came from another kind of source'}; give"
            " the same settings, or begin a new run with this checkpoint as model.path"
        )


def _check_sharding(config: TrainConfig) -> None:
    """Raise ConfigError for settings that sharded weights do not allow."""
    training = config.training
    wrong = {
        "lora": config.lora is not None,
        "heads": config.heads is not None,
        "training.balance_loss": training.balance_loss > 0,
        "training.optimizer adamw8bit": training.optimizer == "adamw8bit",
    }
    if training.sharding != "none" and any(wrong.values()):
        raise ConfigError(
            f"training.sharding {training.sharding} does not go with {', '.join(key for key in wrong if wrong[key])};"
            " leave one of them out"
        )


def _evaluation_openers(config: TrainConfig, encode: Encode) -> dict[str, Callable[[], Any]]:
    def opener(files: Sequence[str], encode: Encode) -> Callable[[], Any]:
        state = (source := RecordSource(files, encode)).state_dict()

        def from_the_beginning() -> RecordSource:
            source.load_state_dict(state)
            return source

        return from_the_beginning

    named = isinstance(config.data.eval_files, Mapping)
    return {
        name: opener(files, _encode_for(config, encode, name if named else None))
        for name, files in config.data.eval_by_name.items()
    }


def _once(config: TrainConfig, encode: Encode) -> Iterator[Mapping[str, Any]]:
    """Yield every training example of ``data.files`` once, in the order of the files."""
    for files in config.data.by_name.values() if config.data.files else ():
        yield from RecordSource(files, encode, shuffle=False, epochs=1, on_error=config.data.on_error)


def _encode_for(config: TrainConfig, encode: Encode, source: str | None) -> Encode:
    """Wrap ``encode`` for the records of ``source``. With several adapters, every encoded item names its adapter."""
    names = list(config.lora.by_name) if config.lora is not None else []
    if not names:
        return encode
    return naming(encode, names, config.data.columns, source if source in names else None)


def _check_adapters(config: TrainConfig) -> None:
    """Raise ConfigError for an adapter without any record in the files."""
    data = config.data
    missing = set(config.lora.by_name if config.lora is not None else ())
    if data.source is not None or data.access != "random":
        return  # these sources can be read only once, so they cannot be searched
    for source, files in data.by_name.items():
        default = source if isinstance(data.files, Mapping) else None
        for file in map(open_file, expand(files)):
            for row in range(len(file)):
                if not missing:
                    return
                with contextlib.suppress(ConfigError):  # reported when the record is read for training
                    missing.discard(adapter_field(file.read(row) or {}, data.columns, default))
    if missing:
        raise ConfigError(
            f"no record is for the adapter {', '.join(sorted(missing))}; name it in the field 'adapter' of records, or"
            " give data.files with a source of its name, or leave it out of lora.adapters"
        )


def _encoder(data: DataSettings, tokenizer_dir: Path | None) -> Encoder:
    return Encoder(
        tokenizer_dir,
        text_field=data.text_field,
        train_on=data.train_on,
        add_eos=data.add_eos,
        chat_template=None if data.chat_template is None else Path(data.chat_template),
        answers=data.answers,
        columns=data.columns,
    )


def _resume_from(store: CheckpointStore, resume: str) -> Path | None:
    latest = store.latest()
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise ConfigError(
                f"{store.root} has checkpoints ({latest.name}) of an earlier run; go on with --resume auto, or choose "
                "another output directory"
            )
        return None
    chosen = Path(resume)
    chosen = chosen.resolve() if chosen.is_symlink() else chosen  # such as the link ``best``
    if not chosen.is_dir():
        raise ConfigError(f"--resume takes auto, never or the directory of a checkpoint; {resume!r} is none")
    if latest is not None and chosen.resolve().parent == store.root.resolve() and chosen.name != latest.name:
        raise ConfigError(
            f"{store.root} has a newer checkpoint ({latest.name}) than {chosen.name}; choose another output directory, "
            "or remove what is newer"
        )
    if latest is not None and chosen.resolve().parent != store.root.resolve():
        raise ConfigError(
            f"{store.root} has checkpoints ({latest.name}) of another run than {chosen}; choose another output "
            "directory"
        )
    return chosen


def _model_files(config: TrainConfig) -> tuple[NetworkConfig | TransformersShape, ModelFiles]:
    settings = config.model
    raw: dict[str, Any]
    generation = dict(settings.generation_config) if settings.generation_config is not None else None
    if settings.path is not None:
        folder = Path(settings.path)
        if folder.suffix == ".gguf":
            raise ConfigError(
                f"model.path {folder} is a GGUF file, and training needs whole weights; give a directory with"
                " config.json and *.safetensors"
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {folder} is no model directory: it has no config.json")
        raw = read_json(folder / "config.json")
        where = str(folder / "config.json")
        if generation is None and (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
    elif isinstance(settings.config, str):
        raw = read_json(Path(settings.config))
        where = settings.config
    else:
        raw = dict(settings.config or {})
        where = "model.config"
    network = _network(config, raw, generation, where)
    tokenizer_dir = settings.tokenizer_dir
    if tokenizer_dir is not None and not (tokenizer_dir / "tokenizer.json").is_file():
        if settings.tokenizer is not None:
            raise ConfigError(f"model.tokenizer {tokenizer_dir} has no tokenizer.json")
        tokenizer_dir = None
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return network, ModelFiles(config=raw, generation_config=generation, tokenizer_dir=tokenizer_dir, dtype=dtype)


def _network(
    config: TrainConfig, raw: Mapping[str, Any], generation: Mapping[str, Any] | None, where: str
) -> NetworkConfig | TransformersShape:
    """Read the shape of the model, for the implementation that will train it (Chairlift's layers or transformers)."""
    impl = config.model.impl
    if impl == "transformers" or (impl == "auto" and raw.get("model_type") not in FAMILIES):
        shape = read_shape(raw, where)
        if config.training.balance_loss:
            raise ConfigError(
                f"balance_loss is for native models, and {shape.model_type} is one of transformers; leave it out, or"
                " use ExpertCounts in a loop of your own (docs/training.md)"
            )
        return shape
    network = parse_config(raw, generation, where=where)
    if network.vision is not None:
        raise ConfigError(f"{where}: a model that reads images is not trained yet; use a model of text")
    return network


def _source_openers(config: TrainConfig, encode: Encode) -> dict[str, Callable[[Callable[[], bool]], Any]]:
    data = config.data
    if data.source is not None:
        made = _import_source(data)
        return {"data": lambda _wait: made()}
    named = isinstance(data.files, Mapping)
    openers = {
        name: _file_opener(config, files, _encode_for(config, encode, name if named else None))
        for name, files in data.by_name.items()
    }
    _check_adapters(config)
    return openers


def _file_opener(config: TrainConfig, files: Sequence[str], encode: Encode) -> Callable[[Callable[[], bool]], Any]:
    data = config.data
    for file in expand(files):
        if not file.is_file():
            raise ConfigError(f"data file {file} does not exist")
    if data.access == "random":
        source = RecordSource(
            files, encode, shuffle=data.shuffle, epochs=data.epochs, seed=config.seed, on_error=data.on_error
        )
        return lambda _wait: source
    follow = data.access == "follow"
    FollowedLines(files, encode, follow=follow)  # for its checks alone
    return lambda wait: FollowedLines(files, encode, follow=follow, on_error=data.on_error, wait=wait)


def _mixed(config: TrainConfig, sources: Mapping[str, Any]) -> Any:
    """The only source, or a sampler that mixes several sources and detects drift."""
    if config.drift is None and len(sources) == 1:
        return next(iter(sources.values()))
    settings = config.drift or DriftSettings(replay=0.0)
    settings = dataclasses.replace(settings, weights=settings.weights or config.data.weights)
    return DriftSampler(sources, **dataclasses.asdict(settings), seed=config.seed)


def _import_source(data: DataSettings) -> Callable[[], Any]:
    members = ("__iter__", "state_dict", "load_state_dict")
    example = "a class with these methods, so that a run can be resumed (docs/training.md)"
    made = load_plugin("data.source", data.source or "", lambda found: found, members, example)

    def make() -> Any:
        try:
            return made(**data.options)
        except TypeError as error:
            raise ConfigError(f"data.source {data.source!r} does not take these data.options: {error}") from None

    return make


def _stream(config: TrainConfig, network: NetworkConfig | TransformersShape, source: Any, ranks: Ranks) -> PackStream:
    packing = config.packing
    return PackStream(
        source,
        packing.capacity,
        pool=packing.pool,
        align=packing.align,
        max_sequences=packing.max_sequences,
        overflow=packing.overflow,
        ranks=ranks.size,
        rank=ranks.rank,
        balance=Cost.transformer(network.hidden_size) if packing.balance else None,
        window=packing.window,
        step=packing.step,
        seed=config.seed,
    )


def _make_network(prepared: Prepared) -> Network:
    """Create the model to train on its device. Raises ConfigError for a model of transformers whose packed sequences
    affect each other."""
    config = prepared.config
    shape = prepared.network
    device = device_of(prepared.config)
    path = None if config.model.path is None else Path(config.model.path)
    if config.training.forward == "exact" and (isinstance(shape, TransformersShape) or config.heads is not None):
        raise ConfigError(
            "training.forward exact is for models with Chairlift's own layers, trained whole or with adapters; leave"
            " it out"
        )
    if isinstance(shape, TransformersShape):
        return TransformersNetwork(load_for_training(shape, path).to(device))
    keeps_model = config.lora is not None or config.heads is not None
    if path is not None and (prepared.resume_from is None or keeps_model):
        model = load_model(path, shape, torch.float32, weight_format=PLAIN)
    else:
        model = CausalLM(shape)
    model.to(device)
    if config.heads is not None:
        return make_heads(
            model, config.heads, base=str(path), resume_from=prepared.resume_from, examples=prepared.examples
        )
    return native_network(model, _make_adapter(config, model), config.training)


def _make_adapter(config: TrainConfig, model: CausalLM) -> TrainableAdapter | TrainableAdapters | None:
    def make(lora: LoraSettings, *, attached: bool) -> TrainableAdapter:
        torch.manual_seed(config.seed % 2**32)  # each adapter begins as if it were trained alone
        given = {name: value for name, value in dataclasses.asdict(lora).items() if name != "adapters"}
        return TrainableAdapter(model, **given, base=str(config.model.path), attached=attached)

    if config.lora is None:
        return None
    if config.lora.adapters is None:
        return make(config.lora, attached=True)
    return TrainableAdapters({name: make(each, attached=False) for name, each in config.lora.by_name.items()})


def _make_trainer(config: TrainConfig, network: Network, stream: PackStream, drift: DriftSampler | None) -> Trainer:
    if config.heads is not None and isinstance(network, HeadsNetwork):
        decay = config.heads.decay
        return HeadsTrainer(network, config.training, stream, decay=decay, seed=config.seed, drift=drift)
    return Trainer(network, config.training, stream, seed=config.seed, drift=drift)


def device_of(config: TrainConfig) -> str:
    """Device of the model: ``cpu`` or ``cuda``. Raises ConfigError if the device does not exist."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch finds no such device; take cpu, or auto")
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def _restore(trainer: Trainer, directory: Path, meaning: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into the trainer. Returns the whole state in the checkpoint. Raises ConfigError if the
    checkpoint is damaged, belongs to another run, or its run gave the data another meaning."""
    state = load_state(directory)
    try:
        _check_meaning(meaning, state)
        trainer.load_state_dict(state["trainer"])
        set_random_state(state["random"])
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        why = error if isinstance(error, ConfigError) else f"it is damaged ({error!r})"
        raise ConfigError(f"cannot go on from {directory}: {why}; to start a new run, give another --output") from None
    return state


def _evaluation(prepared: Prepared, ranks: Ranks) -> Evaluation | None:
    if not prepared.open_evaluation:
        return None
    packing = prepared.config.packing
    made = Evaluation(prepared.open_evaluation, capacity=packing.capacity, overflow=packing.overflow, ranks=ranks)
    made.check()
    return made


def _both(first: Callable[..., None], second: Callable[..., Any] | None) -> Callable[..., None]:
    """Create a function that calls ``first``, then ``second`` if it is given, with the same arguments."""

    def call(*args: Any) -> None:
        first(*args)
        if second is not None:
            second(*args)

    return call


def train(
    config: TrainConfig,
    *,
    resume: str = "auto",
    on_step: Callable[[TrainingStepResult, Trainer], None] | None = None,
    on_save: Callable[[str], None] = lambda _point: None,
    on_evaluation: Callable[[EvaluationResult], None] = lambda _result: None,
    on_start: Callable[[Network], None] = lambda _network: None,
    on_begin: Callable[[Trainer], None] = lambda _trainer: None,
) -> Outcome:
    """Train until the schedule or the data ends, or until SIGINT or SIGTERM, and write a checkpoint at the end.

    Under ``torchrun`` every process calls this function, and rank 0 writes the files. On each rank, ``on_start`` is
    called when the model is loaded, ``on_begin`` before the first step, ``on_step`` after each step, and
    ``on_evaluation`` after each evaluation. For ``on_save`` see :func:`prepare`. Raises ConfigError and ModelLoadError
    before the training starts, and DivergedError.
    """
    prepared = prepare(config, resume=resume, ranks=world_size(), on_save=on_save)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with process_group(device_of(config)) as ranks, _Interrupts() as interrupts, contextlib.ExitStack() as stack:
        sources = {name: open_source(interrupts.wait) for name, open_source in prepared.open_sources.items()}
        source = _mixed(config, sources)
        stream = _stream(config, prepared.network, source, ranks)
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # for new weights, and for custom sources
            seed(config.seed % 2**32)
        drift = source if isinstance(source, DriftSampler) else None
        network = _make_network(prepared)
        on_start(network)
        trainer = _make_trainer(config, network, stream, drift)
        state = None if prepared.resume_from is None else _restore(trainer, prepared.resume_from, prepared.meaning)
        interrupts.watch(trainer)
        if config.tensorboard and ranks.rank == 0:
            board = Board(prepared.store.root / "tensorboard", after=trainer.num_steps)
            stack.callback(board.close)
            on_step = _both(board.step, on_step)
            on_evaluation = _both(board.evaluation, on_evaluation)
        run = _Run(prepared, ranks, trainer, on_step, on_evaluation, _evaluation(prepared, ranks))
        if state is not None:
            run.remember(state.get("best"))
        on_begin(trainer)
        outcome = run.go()
        skipped = sum(getattr(each, "skipped", 0) for each in sources.values())
        notes = Notes()
        for each in sources.values():
            notes.merge(getattr(each, "notes", {}))
        stats = stream.stats()
        return dataclasses.replace(outcome, skipped=skipped, cut=stats.cut, dropped=stats.dropped, notes=notes)


@dataclasses.dataclass(slots=True)
class _Run:
    prepared: Prepared
    ranks: Ranks
    trainer: Trainer
    on_step: Callable[[TrainingStepResult, Trainer], None] | None
    on_evaluation: Callable[[EvaluationResult], None]
    evaluation: Evaluation | None
    saved: int = -1
    """Step of the newest checkpoint. -1: no checkpoint was written yet."""
    best: tuple[int, float] | None = None
    """(step, evaluation loss) of the best checkpoint. None: there was no evaluation yet."""

    def remember(self, best: Any) -> None:
        """Use ``best``, from a resumed checkpoint, as the best checkpoint so far, if its directory still exists."""
        store = self.prepared.store
        if best is not None and (store.root / f"step-{int(best[0]):08d}").is_dir():
            self.best = (int(best[0]), float(best[1]))
            store.best = self.best[0]
            if self.ranks.rank == 0:
                store.point_to_best()

    def go(self) -> Outcome:
        trainer = self.trainer
        every = self.prepared.config.checkpoints.every
        last = None
        stopped = False
        # A custom source that has ended is not read again, because it might begin again. Files are read again: they may
        # have grown, or the number of epochs may be larger now.
        is_over = self.prepared.config.data.source is not None and trainer.stream is not None and trainer.stream.ended
        if self.prepared.resume_from is not None and self.prepared.resume_from.parent == self.prepared.store.root:
            self.saved = trainer.num_steps
        with contextlib.suppress(_Stopped):
            stopped = True
            for last in () if is_over else trainer.run():
                if self.on_step is not None:
                    self.on_step(last, trainer)
                if last.stop:
                    break
                if trainer.num_steps % every == 0:
                    self.save()
            else:
                stopped = False
        directory = self.save(evaluates=not stopped)
        return Outcome(directory, trainer.num_steps, not stopped, last, best=self.best)

    def _evaluate(self) -> None:
        """Evaluate, and make this step's checkpoint the best if its loss is the lowest so far."""
        if self.evaluation is None:
            return
        result = self.evaluation.run(self.trainer)
        self.on_evaluation(result)
        if self.best is None or result.total.loss < self.best[1]:
            self.best = (result.step, result.total.loss)
            self.prepared.store.best = result.step
        if self.ranks.rank == 0:
            self.prepared.store.root.mkdir(parents=True, exist_ok=True)
            path = self.prepared.store.root / "evaluations.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            # A killed run may have evaluated steps after its last checkpoint. These evaluations are replaced.
            lines = [line for line in lines if json.loads(line)["step"] < result.step]
            with replacing(path) as file:
                file.write("".join(line + "\n" for line in [*lines, json.dumps(result.as_dict())]))

    def save(self, *, evaluates: bool = True) -> Path:
        step = self.trainer.num_steps
        store = self.prepared.store
        if evaluates and self.saved != step:
            self._evaluate()
        if self.saved != step:
            self._write(step)
        self.saved = step
        return store.root / f"step-{step:08d}"

    def _write(self, step: int) -> None:
        """Write a checkpoint. Sharded weights are gathered for it."""
        trainer = self.trainer
        is_writer = self.ranks.rank == 0
        if not is_writer and not trainer.is_sharded:
            return
        state = {
            "trainer": trainer.state_dict(),
            "random": random_state(),
            "config": dataclasses.asdict(self.prepared.config),
            "data": dict(self.prepared.meaning),
            "best": self.best,
        }
        with together(trainer.model):
            if is_writer:
                self.prepared.store.save(step, state, trainer.network, self.prepared.files)


class _Interrupts:
    """Context with handlers for SIGINT and SIGTERM: the run ends after the current step. A second SIGINT ends it at
    once."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._stop_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        with contextlib.suppress(ValueError):  # handlers belong to the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop_requested = True
        if self._trainer is not None:
            self._trainer.stop_requested = True

    def watch(self, trainer: Trainer) -> None:
        """Register the trainer that a signal stops."""
        self._trainer = trainer
        trainer.stop_requested = self._stop_requested

    def wait(self) -> bool:
        """Wait a moment for new data. A source without data calls this method. Raises _Stopped after a signal."""
        if self._stop_requested:
            raise _Stopped
        time.sleep(_POLL_SECONDS)
        return True
