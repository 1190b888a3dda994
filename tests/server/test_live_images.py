"""The live view shows the memory of images: the page's state is that of the engine, and a text model has none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chairlift.server.pages import live
from tests.engine.test_step_export import IMAGE_SEEDS, watched, watched_images
from tests.server.harness import PATIENCE
from tests.server.watched import make_truth

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
MODEL = (Path(live.__file__).parent / "static" / "live_model.js").read_text()


def told(script: str, lines: bytes = b"") -> Any:
    """What a script prints that uses the page's model. The script reads ``lines`` from its standard input."""
    command = ["node", "-e", MODEL + script]
    return json.loads(subprocess.run(command, input=lines, stdout=subprocess.PIPE, check=True, timeout=PATIENCE).stdout)


_IMAGES = """
const model = new Model();
const sizes = { run: "1", max_num_seqs: 1, pools: [4], requests: [], on: [], state: [0, "", 3, 0, 0], cached: [[]] };
const step = (step, more = {}) => model.take({ step, t: [step, step + 1], ...more });
const text = (i) => (model.imagesAt(i) ? imageText(model.imagesAt(i), model.about.max_image_bytes) : null);
model.take({ key: { ...sizes, after: 0 } });
step(1);
const without = text(Infinity);
model.take({ key: { ...sizes, run: "2", after: 0, images: [4, 0, 0, 2 ** 20, 0, 0], max_image_bytes: 2 ** 30 } });
step(1); step(2, { images: [5, 1, 0, 1.5 * 2 ** 20, 1, 1] });
model.take({ at: 3, images: [1006, 1, 1, 2 ** 30, 2, 0] });
const found = [text(0), text(1), text(Infinity)];
model.take({ key: { ...sizes, run: "2", after: 2, images: [9, 9, 9, 9, 9, 9], max_image_bytes: 0 } });
const unchanged = text(Infinity) === found[2];
model.most = 12;
for (let i = 3; i < 40; i++) step(i);
console.log(JSON.stringify([without, found, unchanged, model.images.length, text(Infinity) === found[2]]));
"""


def test_the_page_shows_the_memory_of_images_only_if_the_model_reads_them() -> None:
    without, found, unchanged, count, is_kept = told(_IMAGES)
    assert without is None
    assert found == [
        "Encoded images use 1 MiB of 1,024 MiB. The encoder's queue has 0 tiles."
        " Since the start: 4 tiles encoded, 0 given up for other images, 0 encoded again.",
        "Encoded images use 1.5 MiB of 1,024 MiB. The encoder's queue has 1 tile; the next tile waits for room."
        " Since the start: 5 tiles encoded, 1 given up for other images, 0 encoded again.",
        "Encoded images use 1,024 MiB of 1,024 MiB. The encoder's queue has 2 tiles."
        " Since the start: 1,006 tiles encoded, 1 given up for other images, 1 encoded again.",
    ]
    assert unchanged, "a page that has read the earlier lines skips a snapshot"
    assert (count, is_kept) == (1, True), "states that no stored step needs are dropped"


_READ = """
const model = new Model(), text = require("fs").readFileSync(0, "utf8");
for (const line of text.split("\\n").filter(Boolean)) model.take(JSON.parse(line));
console.log(JSON.stringify([model.imagesAt(Infinity) ?? null, model.about.max_image_bytes ?? null]));
"""


@pytest.mark.parametrize("seed", IMAGE_SEEDS)
def test_the_page_ends_with_the_state_of_the_engine(seed: int) -> None:
    """Also a page that begins at a later snapshot."""
    simulation, pieces = watched_images(seed)
    images, starts = (
        simulation.engine.core.preparers.images,
        [at for at, piece in enumerate(pieces) if piece[:7] == b'{"key":'],
    )
    for start in (starts[0], starts[-1]):
        assert told(_READ, b"\n".join(pieces[start:])) == [list(images.state()), images.limit or 0]


def test_the_page_of_a_text_model_knows_no_images() -> None:
    assert told(_READ, watched(make_truth(seed=3))) == [None, None]
