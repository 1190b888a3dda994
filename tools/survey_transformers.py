"""Run every causal language model that transformers has through Chairlift's fallback, tiny and random.

::

    python tools/survey_transformers.py [MODEL_TYPE ...]

prints a line each: ``right``, or why it is not. What is right belongs into ``ALLOWED`` of
``chairlift/models/fallback/families.py``, the others into ``REFUSED`` with a reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from chairlift.models.fallback import config as fallback_config
from chairlift.models.fallback.loading import load_transformers_model
from tests.models.tiny_transformers import tiny_transformers_model


def survey(model_type: str, directory: Path) -> str:
    """One family: ``right``, or what is wrong."""
    try:
        model_dir = tiny_transformers_model(directory, model_type)
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return f"CANNOT MAKE {type(error).__name__}: {str(error)[:200]!r}"
    try:
        config = fallback_config.read_transformers_config(model_dir)
        load_transformers_model(model_dir, config, torch.float32, torch.device("cpu"))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error).split(': ', 1)[-1][:260]!r} at {Path(last.filename).name}:{last.lineno}"
    return "right"


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser()
    parser.add_argument("model_types", nargs="*")
    asked = parser.parse_args().model_types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    fallback_config.ALLOWED = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # type: ignore[misc]
    warnings.simplefilter("ignore")
    for model_type in asked:
        with tempfile.TemporaryDirectory() as directory:
            print(f"{model_type}: {survey(model_type, Path(directory))}", flush=True)


if __name__ == "__main__":
    main()
