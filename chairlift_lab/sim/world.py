"""Draws a simulated world from a seed: settings of an engine and a list of events.

A world is plain data, so that a failing world can be reduced by leaving out events.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from chairlift.config import ONE_STATE
from chairlift.models.hashlm import STATE

__all__ = ["BROKEN_IMAGE", "IMAGE_TOKEN", "Event", "World", "allowed_at", "make_world"]

LETTERS = 12
"""Token ids below this number are letters. Stop strings consist of these letters, so that they do occur in outputs."""
VOCAB_SIZE = 20
EOS = 19
IMAGE_TOKEN = 18
"""Token id of the markers and placeholders of images, in worlds with images."""
BROKEN_IMAGE = 5
"""Content of an image that cannot be encoded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An arrival, a fault, or another change that happens before step ``at``."""

    at: int
    kind: str
    """Kind of event: ``arrive``, ``abort``, ``preempt``, ``duplicate``, ``nan``, ``raise``, ``refuse_admission``,
    ``refuse_growth``, ``evict``, ``stall`` (the clock jumps ahead), ``starve_forward`` and ``starve_sampling`` (no
    memory for one row), ``break_moves`` (blocks cannot be copied or swapped), ``set_back`` (the clock goes back),
    ``limits`` (a governor changes the scheduler's settings), ``reload`` (an adapter is replaced under its name),
    ``unload`` or ``rewrite`` (its files are replaced without notice)."""
    target: int = 0
    """Depending on ``kind``: number of a request, of a batch row or of an adapter, or a count or a duration."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """All inputs of one simulated execution: settings of the engine, and events."""

    seed: int
    block_size: int
    windows: tuple[int | None, ...]
    """For each cache group: the size of its sliding window, None for full attention, or
    :data:`~chairlift.models.hashlm.STATE` for recurrent states."""
    num_blocks: int
    max_model_len: int
    scheduler: dict[str, Any]
    """Name -> value of each setting of the scheduler."""
    bounds: dict[str, int]
    """Name -> value of ``look_ahead``, ``max_times_passed`` and ``max_preemptions``: constants outside simulations."""
    enable_prefix_caching: bool
    hash_bits: int | None
    """Number of bits of the prefix cache's hash. A few bits make collisions common. None: the whole SHA-256."""
    with_text: bool
    """Whether the engine has a tokenizer, so that requests can have stop strings and outputs have text."""
    events: tuple[Event, ...]
    num_host_blocks: int = 0
    prefix_offload: bool = False
    scripted: bool = False
    """Whether requests have scripted token masks, or several sample positions in a chunk."""
    grammars: bool = False
    """Whether some requests have a grammar."""
    late_masks: tuple[float, int] | None = None
    """(probability that a mask of a grammar is late, maximum number of steps until it is made). None: no mask is
    late."""
    mask_limits: tuple[float, float, float] | None = None
    """(mean processor seconds of a late mask, maximum for a request, maximum for a tenant). None: such a mask takes no
    time."""
    drafts: bool = False
    """Whether the engine drafts tokens for requests (speculative decoding)."""
    state_span: int = ONE_STATE
    """Number of positions that one block covers in a cache group of recurrent states."""
    adapters: tuple[int, int, int] | None = None
    """(maximum number of adapters in a step, maximum in memory, number of steps that it takes to read an adapter).
    None in worlds without adapters."""
    images: tuple[int, float, int, bool] | None = None
    """In worlds with images: (number of pieces per tile, seconds to encode a piece, maximum bytes of image rows that no
    request uses, whether an image must be computed in one step). None in other worlds."""
    max_tiles: int | None = None
    """Maximum number of tiles whose rows are in memory. None: no limit."""
    cache_eviction: str = "lease"
    """Rule that says which cached block is evicted next."""


CLASSES = {
    "priority": {"min_seqs": 1},
    "chat": {"priority": -3, "min_blocks": 3, "ttft_ms": 300.0},
    "batch": {"priority": 4, "min_step_tokens": 1},
}
"""Settings of the service classes, in worlds that have classes. Even the smallest world has the memory that these
classes reserve."""


def make_world(seed: int) -> World:
    """Draw the world of a seed. Each feature is off in about half of the worlds, so that a world has few features."""
    rng = random.Random(seed)

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    block_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.choice([16, 40, 64, 96])
    window = rng.choice([1, 3, 7, 16])
    windows = maybe((None,), rng.choice([(window,), (None, window)]))
    roomy = -(-max_model_len // block_size) * rng.randint(2, 8)
    tight = max(1, -(-max_model_len // block_size) // rng.choice([1, 2])) + rng.randint(0, 6)
    scheduler, bounds = _scheduler(rng, maybe)
    with_text = maybe(True, False)
    # Settings that were added later use a separate random generator, so that the worlds of known seeds do not change.
    later = random.Random(seed ^ 0x5E12)
    events = _arrivals(rng, block_size, max_model_len, with_text)
    if later.random() < 0.5:
        scheduler |= _service(later, scheduler)
        tiers = CLASSES if scheduler["service_classes"] else ("default", "priority", "flex")
        for event in events:
            event.args.update(_promise(later, [None, *tiers]))
    scheduler["preemption_mode"] = later.choice(["auto", "recompute", "swap", "swap", "none"])
    num_host_blocks = later.choice([0, 2, 8, 64])
    if later.random() < 0.3:
        scheduler["prefill_mode"] = later.choice(["prefill_first", "decode_first", "separate", "auto"])
    if rng.random() < 0.5:
        events += _faults(rng, len(events), max(event.at for event in events) + 20)
    horizon = max(event.at for event in events) + 20
    if later.random() < 0.3:
        events += _limits(later, scheduler, horizon)
    num_blocks = 1 + maybe(tight, roomy)
    enable_prefix_caching = maybe(True, False)
    hash_bits = maybe(None, rng.choice([3, 8]))
    prefix_offload = seed % 5 == 1  # not drawn: a draw would change the worlds of all seeds
    if prefix_offload:
        enable_prefix_caching = True
        num_host_blocks = later.choice([3, 16, 64])
        _come_again(later, [event for event in events if event.kind == "arrive"], block_size, max_model_len)
        events += [Event(later.randrange(horizon), "raise", 0) for _ in range(later.choice([0, 0, 3, 9]))]
    if seed % 10 == 8:
        _come_again(later, [event for event in events if event.kind == "arrive"], block_size, max_model_len)
        windows, num_blocks = _cramped(later, scheduler, block_size, max_model_len)
    if seed % 10 == 3:
        crowded = random.Random(seed ^ 0x5A1E)
        windows = (None,)
        num_blocks = _crowded(crowded, scheduler, events, block_size, max_model_len)
    scripted = seed % 10 == 7
    if scripted:
        _script(random.Random(seed ^ 0x3A5C), [event for event in events if event.kind == "arrive"])
    grammars = seed % 20 == 19
    if grammars:
        with_text = True  # grammars need a tokenizer
        _hold(random.Random(seed ^ 0x6A3B), [event for event in events if event.kind == "arrive"])
    drafts = seed % 10 in (2, 6) or seed % 40 == 39  # the seeds of the second condition combine drafts with grammars
    if seed % 40 == 39:
        scheduler |= {"batching": "continuous", "max_num_batched_tokens": max(48, scheduler["max_num_batched_tokens"])}
    if seed % 10 == 6:
        events = _draft(random.Random(seed ^ 0x6D1A), scheduler, events, horizon)
    chosen = seed % 100 in (54, 94)
    events, adapters = _adapt(random.Random(seed ^ 0x10A4), events, horizon) if chosen else (events, None)
    world = World(
        seed=seed,
        block_size=block_size,
        windows=windows,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        scheduler=scheduler,
        bounds=bounds,
        enable_prefix_caching=enable_prefix_caching,
        hash_bits=hash_bits,
        with_text=with_text,
        events=tuple(sorted(events, key=lambda event: event.at)),
        num_host_blocks=num_host_blocks,
        prefix_offload=prefix_offload,
        scripted=scripted,
        grammars=grammars,
        late_masks=_late_masks(random.Random(seed ^ 0x51CE)) if seed % 100 in (39, 59, 79) else None,
        drafts=drafts,
        adapters=adapters,
        cache_eviction={21: "tlru", 31: "lru", 41: "asked"}.get(seed % 50, "lease"),  # worlds with evicted prefixes
    )
    return _with_more(world, horizon)


def _with_more(world: World, horizon: int) -> World:
    """Add the kinds of faults and of requests that only the worlds of some seeds have."""
    seed = world.seed
    if seed % 20 == 5 or seed % 100 == 37:  # the seeds of the second condition combine it with masks
        world = _starve(random.Random(seed ^ 0xA110), world, horizon)
    if seed % 200 == 99:
        rng = random.Random(seed ^ 0x51CE)
        world = dataclasses.replace(world, late_masks=_late_masks(rng))
        if seed % 400 == 99:
            limits = rng.choice([0.05, 0.2, 1.0]), rng.choice([0.5, 2.0, 1e6]), rng.choice([0.5, 2.0, 1e6])
            return dataclasses.replace(world, mask_limits=limits)
        return _recur(rng, world)
    if seed % 20 in (4, 15) or seed % 100 == 66:  # the seeds of the second condition combine states with drafts
        return _recur(random.Random(seed ^ 0x57A7), world)
    if seed % 100 in (60, 61, 90):
        return _together(random.Random(seed ^ 0x7061), world)
    return _picture(random.Random(seed ^ 0x1346), world) if seed % 100 in (14, 32, 74) else world


def _together(rng: random.Random, world: World) -> World:
    """Let prompts with long common beginnings arrive in groups, with a prefix cache."""
    size = world.block_size
    longest = max(world.max_model_len, 10 * size)
    arrivals = [event for event in world.events if event.kind == "arrive"]
    begins = [[rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(4, 8) * size)] for _ in range(2)]
    begins.append(begins[0] + [rng.randrange(VOCAB_SIZE - 1) for _ in range(size)])
    moved = {}
    at = 0
    for event in arrivals:
        at += rng.choice([0, 0, 0, 1, 6])
        begin = rng.choice(begins) if rng.random() < 0.8 else []
        prompt = (begin + event.args["prompt"])[: longest - 1]
        most = min(event.args["max_tokens"], longest - len(prompt))
        moved[id(event)] = dataclasses.replace(event, at=at, args={**event.args, "prompt": prompt, "max_tokens": most})
    events = tuple(sorted((moved.get(id(event), event) for event in world.events), key=lambda event: event.at))
    num_blocks = max(world.num_blocks, 1 + -(-longest // size) + rng.randint(0, 20))
    return dataclasses.replace(
        world, events=events, max_model_len=longest, num_blocks=num_blocks, enable_prefix_caching=True
    )


def _picture(rng: random.Random, world: World) -> World:
    """Add images to most prompts. Some prompts repeat an earlier prompt, with the same images or with other images in
    their place."""
    arrivals = [event for event in world.events if event.kind == "arrive"]
    contents = rng.choice([[1], [1, 2, 3], [1, 2, 3], [1, 2, 3, BROKEN_IMAGE]])
    edges = [1, 2, world.block_size, world.block_size + 1, 2 * world.block_size + 1]
    for number, event in enumerate(arrivals):
        args = event.args
        args["prompt"] = [token - (token == IMAGE_TOKEN) for token in args["prompt"]]
        earlier = rng.choice(arrivals[:number]).args if number and rng.random() < 0.6 else None
        if earlier is not None:
            others = rng.random() < 0.5
            args["images"] = [
                (position, length, rng.choice(contents) if others else content)
                for position, length, content in earlier.get("images", ())
            ]
            args["prompt"] = (earlier["prompt"] + args["prompt"])[: world.max_model_len - 1]
            if args["images"] and sum(args["images"][-1][:2]) > len(args["prompt"]):
                args["prompt"] = list(earlier["prompt"])
        elif rng.random() < 0.8:
            args["images"] = []
            for _ in range(rng.choice([1, 1, 2, 3])):
                _insert_image(rng, args, rng.choice(edges), rng.choice(contents), world.max_model_len)
        args["max_tokens"] = min(args["max_tokens"], world.max_model_len - len(args["prompt"]))
    encoder = rng.choice([1, 1, 2, 4]), rng.choice([0.0, 0.001, 0.01]), rng.choice([0, 150, 10_000])
    caching = world.enable_prefix_caching or rng.random() < 0.5
    whole = rng.random() < 0.5
    scheduler = world.scheduler
    if whole:  # a step must have room for the largest image beside all decode rows
        longest = max((image[1] for event in arrivals for image in event.args.get("images", ())), default=0)
        most = max(scheduler["max_num_batched_tokens"], longest + scheduler["max_num_seqs"])
        scheduler = {**scheduler, "max_num_batched_tokens": most}
    most = max((len({image[1:] for image in event.args.get("images", ())}) for event in arrivals), default=0)
    max_tiles = rng.choice([max(most, 1), max(most, 1), most + 1, None])
    images = (*encoder, whole)
    return dataclasses.replace(
        world, images=images, max_tiles=max_tiles, enable_prefix_caching=caching, scheduler=scheduler
    )


def _insert_image(rng: random.Random, args: dict[str, Any], length: int, content: int, max_model_len: int) -> None:
    """Insert an image into the prompt of an arrival, after its other images, if there is room."""
    prompt = args["prompt"]
    images = args["images"]
    if len(prompt) + length >= max_model_len:
        return
    position = rng.randint(sum(images[-1][:2]) if images else 0, len(prompt))
    args["prompt"] = [*prompt[:position], *[IMAGE_TOKEN] * length, *prompt[position:]]
    images.append((position, length, content))


def _recur(rng: random.Random, world: World) -> World:
    """Add a cache group of recurrent states to a world, or replace all its groups by such a group.

    Some of these worlds take snapshots of the states every few blocks.
    """
    span = rng.choice([world.block_size, 2 * world.block_size, 4 * world.block_size, ONE_STATE])
    windows = rng.choice([(STATE,), (*world.windows, STATE), (STATE, *world.windows)])
    world = dataclasses.replace(world, windows=windows, state_span=span)
    if rng.random() < 0.4:
        return world
    arrivals = [event for event in world.events if event.kind == "arrive"]
    _come_again(rng, arrivals, world.block_size, world.max_model_len)
    offload = rng.random() < 0.3
    hosts = rng.choice([3, 16, 64]) if offload else world.num_host_blocks
    return dataclasses.replace(world, enable_prefix_caching=True, prefix_offload=offload, num_host_blocks=hosts)


def _adapt(rng: random.Random, events: list[Event], horizon: int) -> tuple[list[Event], tuple[int, int, int]]:
    """Give most requests an adapter, and add events that replace adapters.

    There are often more adapters than a step or the memory may have. Returns the events and ``World.adapters``.
    """
    count = rng.choice([2, 3, 5, 9])
    max_in_step = rng.choice([1, 1, 2, 3])
    for event in events:
        if event.kind == "arrive" and rng.random() < 0.8:
            event.args["adapter"] = 1 + min(int(rng.paretovariate(0.8)) - 1, count - 1)
    kinds = rng.choice([(), ("reload",), ("reload", "unload"), ("reload", "rewrite")])
    changes = [
        Event(rng.randrange(horizon), kind, rng.randint(1, count))
        for kind in kinds
        for _ in range(rng.choice([1, 4, 12]))
    ]
    max_in_memory = max_in_step + rng.choice([0, 0, 1, 4])
    return [*events, *changes], (max_in_step, max_in_memory, rng.choice([0, 0, 1, 5]))


def _draft(rng: random.Random, scheduler: dict[str, Any], events: list[Event], horizon: int) -> list[Event]:
    """Raise the token budget so that most steps have room for drafts, and make rows fail in some steps."""
    scheduler |= {"batching": "continuous", "max_num_batched_tokens": max(48, scheduler["max_num_batched_tokens"])}
    unlimited = [event for event in events if event.kind != "limits"]
    return unlimited + [Event(rng.randrange(horizon), "nan", rng.randrange(40)) for _ in range(rng.choice([0, 3, 12]))]


def allowed_at(args: dict[str, Any], position: int) -> list[int] | None:
    """Token ids, ascending, that a request's mask allows at ``position`` of its sequence. None: all ids are allowed.

    ``args`` are those of the event with which the request arrives.
    """
    masks = args.get("masks")
    return masks[position % len(masks)] if masks else None


def _script(rng: random.Random, arrivals: list[Event]) -> None:
    """Give requests token masks that change with the position, and chunks with several sample positions."""
    for event in arrivals:
        event.args["sample_positions"] = rng.choice([1, 1, 2, 3, 9])
        some = [sorted(rng.sample(range(VOCAB_SIZE), rng.choice([1, 2, 5, 12]))) for _ in range(rng.choice([1, 2, 4]))]
        event.args["masks"] = rng.choice([None, some, [None, *some]])


def _hold(rng: random.Random, arrivals: list[Event]) -> None:
    """Give most requests a grammar. A few grammars are shared by many requests, and some grammars fail."""
    outcomes = ["good"] * 8 + ["refused", "lost", "empty", "broken"]
    scripts = [
        {
            "seed": rng.randrange(1 << 20),
            "delay": rng.choice([0, 0, 1, 3, 10]),
            "outcome": rng.choice(outcomes),
            "at": rng.randrange(6),
        }
        for _ in range(rng.choice([1, 2, 4, 8]))
    ]
    for event in arrivals:
        if rng.random() < 0.7:
            event.args["grammar"], event.args["ignore_eos"] = rng.choice(scripts), False


def _late_masks(rng: random.Random) -> tuple[float, int]:
    """Draw ``World.late_masks`` of a world with grammars."""
    return rng.choice([0.1, 0.5, 0.9]), rng.choice([0, 1, 3, 20])


def _scheduler(rng: random.Random, maybe: Callable[[Any, Any], Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Draw ``World.scheduler`` and ``World.bounds``."""
    batching = maybe("continuous", rng.choice(["static", "dynamic", "continuous"]))
    settings = {
        "max_num_seqs": rng.choice([1, 2, 3, 5, 8, 16]),
        "max_num_batched_tokens": rng.choice([1, 2, 5, 16, 64]),
        "num_lookahead_steps": maybe(0, rng.choice([1, 2])),
        "batching": batching,
        "batch_wait_ms": maybe(0.0, rng.choice([1.0, 20.0])),
    }
    bounds = {
        "look_ahead": rng.choice([0, 1, 8]),
        "max_times_passed": rng.choice([1, 4]),
        "max_preemptions": rng.choice([1, 2, 8]),
    }
    return settings | {"admission_watermark": maybe(0.0, 0.1)}, bounds


def _cramped(
    rng: random.Random, scheduler: dict[str, Any], block_size: int, max_model_len: int
) -> tuple[tuple[int, ...], int]:
    """Draw ``windows`` and ``num_blocks`` of a world with sliding windows and little memory.

    The memory is little more than one request needs. Few requests, or none, can be preempted.
    """
    window = rng.choice([1, 3, 7, 16])
    step = scheduler["max_num_batched_tokens"]
    scheduler["preemption_mode"] = rng.choice(["none", scheduler["preemption_mode"]])
    scheduler["batching"] = rng.choice(["static", scheduler["batching"]])
    per_request = min(-(-(window + 4 + step) // block_size) + 1, -(-max_model_len // block_size))
    windows = rng.choice([(window,), (window, window + 5), (window + 5, window)])
    return windows, 1 + per_request + rng.randint(0, 2 * per_request)


def _crowded(
    rng: random.Random, scheduler: dict[str, Any], events: list[Event], block_size: int, max_model_len: int
) -> int:
    """Add many requests of all sizes that arrive at about the same time, and set enough rows to reserve some for short
    requests. Returns ``num_blocks`` of the world."""
    scheduler["max_num_seqs"] = rng.choice([32, 33, 48])
    scheduler["max_num_batched_tokens"] = rng.choice([48, 64, 96])
    scheduler["policy_share"] = rng.choice([0.25, 0.5, 0.75, 0.75, 1.0])
    for event in events:
        if event.kind == "limits":  # these limits were drawn for the earlier token budget
            event.args["tokens"] = min(event.args["tokens"], scheduler["max_num_batched_tokens"])
            event.args["running"] = min(event.args["running"], event.args["tokens"])
    arrivals = [event for event in events if event.kind == "arrive"]
    number = max(event.target for event in arrivals)
    stems = [[3] * (max_model_len * 3 // 4), arrivals[0].args["prompt"]]
    for _ in range(rng.choice([10, 40, 60])):
        number += 1
        length = rng.choice([1, 2, rng.randint(1, max_model_len - 1), max_model_len - 1])
        stem = rng.choice(stems) if rng.random() < 0.3 else []
        stem = stem[: max_model_len - 1 - length]
        length += len(stem)
        args = dict(rng.choice(arrivals).args) | {
            "prompt": stem + [rng.randrange(VOCAB_SIZE - 1) for _ in range(length - len(stem))],
            "max_tokens": min(rng.choice([1, 5, 30]), max_model_len - length),
            "n": 1,
        }
        events.append(Event(rng.choice([0, 0, 1, 2, 9, 20, 30]), "arrive", number, args))
    return 1 + rng.choice([-(-max_model_len // block_size) * 3, 200, 400, 1000])


def _service(rng: random.Random, scheduler: dict[str, Any]) -> dict[str, Any]:
    reserving = min(scheduler["max_num_seqs"], scheduler["max_num_batched_tokens"]) > 1 and rng.random() < 0.5
    return {
        "scheduling_policy": "priority",
        "service_classes": json.dumps(CLASSES) if reserving else "",
        "tenant_weights": rng.choice(["", '{"b": 3}']),
        "ageing_seconds": rng.choice([0.02, 0.2, 30.0]),
        "late_requests": rng.choice(["downgrade", "drop"]),
    }


def _promise(rng: random.Random, tiers: list[str | None]) -> dict[str, Any]:
    return {
        "priority": rng.choice([None, None, 0, -5, 5]),
        "service_tier": rng.choice(tiers),
        "ttft_ms": rng.choice([None, None, 20.0, 500.0]),
        "deadline_ms": rng.choice([None, None, None, 100.0, 2000.0]),
        "tenant": rng.choice(["", "a", "b"]),
    }


def _arrivals(rng: random.Random, block_size: int, max_model_len: int, with_text: bool) -> list[Event]:
    stems = [[rng.randrange(VOCAB_SIZE - 1) for _ in range(max_model_len)] for _ in range(3)]
    shared, salted, sampled = (rng.random() < 0.5 for _ in range(3))
    at = 0
    events = []
    for number in range(rng.choice([1, 2, 4, 8, 12, 20])):
        at += rng.choice([0, 0, 1, 3, 9])
        edges = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, max_model_len - 1]
        length = rng.choice(edges) if rng.random() < 0.4 else int(rng.paretovariate(0.9))
        length = max(1, min(length, max_model_len - 1))
        stem = rng.choice(stems)[:length] if shared else []
        cut = rng.randint(0, len(stem))
        prompt = stem[:cut] + [rng.randrange(VOCAB_SIZE - 1) for _ in range(length - cut)]
        args: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": min(rng.choice([1, 2, 5, 12, 30]), max_model_len - length),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "temperature": rng.choice([0.0, 0.7]) if sampled else 0.0,
            "seed": rng.randrange(1 << 30),
            "presence_penalty": 0.5 if sampled and rng.random() < 0.5 else 0.0,
            "ignore_eos": rng.random() < 0.3,
            "stop_token_ids": [rng.randrange(VOCAB_SIZE)] if rng.random() < 0.2 else [],
            "salt": rng.choice(["a", "b"]) if salted else "",
            "stream": rng.random() < 0.5,
        }
        if with_text and rng.random() < 0.5:
            letters = [chr(97 + rng.randrange(LETTERS)) for _ in range(rng.choice([1, 1, 2]))]
            args["stop"] = ["".join(letters)]
            args["include_stop_str_in_output"] = rng.random() < 0.3
        events.append(Event(at, "arrive", number, args))
    return events


def _come_again(rng: random.Random, arrivals: list[Event], block_size: int, max_model_len: int) -> None:
    """Make prompts longer by a few blocks. Some prompts begin with an earlier prompt, to test the prefix cache."""
    for number, event in enumerate(arrivals):
        if number and rng.random() < 0.6:
            event.args["prompt"] = rng.choice(arrivals[:number]).args["prompt"]
        added = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.choice([0, 1, 2 * block_size, 3 * block_size]))]
        event.args["prompt"] = prompt = (event.args["prompt"] + added)[: max_model_len - 1]
        event.args["max_tokens"] = min(event.args["max_tokens"], max_model_len - len(prompt))


def _limits(rng: random.Random, scheduler: dict[str, Any], horizon: int) -> list[Event]:
    """Events that set the scheduler's limits to arbitrary values before some or all steps, as a faulty governor could
    do."""
    max_tokens = scheduler["max_num_batched_tokens"]
    rows = min(scheduler["max_num_seqs"], max_tokens)
    events = []
    for at in range(horizon) if rng.random() < 0.5 else sorted(rng.randrange(horizon) for _ in range(3)):
        running = rng.choice([rng.randint(1, rows), rows])
        args = {
            "running": running,
            "tokens": rng.randint(running, max_tokens),
            "watermark": rng.choice([0.0, 0.0, 0.05, 0.3]),
        }
        events.append(Event(at, "limits", 0, args))
    return events


def _starve(rng: random.Random, world: World, horizon: int) -> World:
    """Add steps in which an allocation for one row fails. In some worlds, blocks cannot be moved in some steps, or the
    clock is set back."""
    kinds = rng.choice([["starve_forward"], ["starve_sampling"], ["starve_forward", "starve_sampling"]])
    events = [Event(rng.randrange(horizon), rng.choice(kinds), rng.randrange(8)) for _ in range(rng.choice([1, 3, 9]))]
    if rng.random() < 0.3:
        events += [Event(rng.randrange(horizon), "break_moves") for _ in range(rng.choice([1, 4]))]
    if rng.random() < 0.2:
        events += [Event(rng.randrange(horizon), "set_back", rng.randrange(1, 40)) for _ in range(3)]
    return dataclasses.replace(world, events=tuple(sorted((*world.events, *events), key=lambda event: event.at)))


def _faults(rng: random.Random, num_requests: int, horizon: int) -> list[Event]:
    kinds = ["abort", "preempt", "duplicate", "nan", "raise", "refuse_admission", "refuse_growth", "evict", "stall"]
    active = [kind for kind in kinds if rng.random() < 0.35]
    events = []
    for kind in active:
        for _ in range(rng.choice([1, 2, 6, 15])):
            events.append(Event(rng.randrange(horizon), kind, rng.randrange(max(num_requests, 4) + 1)))
    return events
