"""Runs every causal language model of transformers through Chairlift's fallback, with tiny random weights.

::

    python tools/survey_transformers.py [MODEL_TYPE ...]

The script prints one line per family: ``right``, or what is wrong. A family that is ``right`` belongs in ``ALLOWED`` of
``chairlift/models/fallback/families.py``, unless it is correct only for short texts. All other families belong in the
table of refusals in that file, with a reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from chairlift.models.fallback import config as fallback_config
from chairlift.models.fallback.loading import load_transformers_model
from tests.models.tiny_transformers import tiny_transformers_model


def survey(model_type: str, directory: Path) -> str:
    """Test one family. Returns ``right``, or a description of the error."""
    try:
        model_dir = tiny_transformers_model(directory, model_type)
        config = fallback_config.read_transformers_config(model_dir)
        load_transformers_model(model_dir, config, torch.float32, torch.device("cpu"))
    except Exception as error:  # the survey continues after any error of a class
        return f"{type(error).__name__}: {' '.join(str(error).split()).rpartition(str(directory))[2][:300]}"
    return "right"


def main() -> None:
    """Test the families that are named on the command line, or all families."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    model_types = parser.parse_args().model_types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    fallback_config.ALLOWED = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # type: ignore[misc]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for model_type in model_types:
        with tempfile.TemporaryDirectory() as directory:
            print(f"{model_type}: {survey(model_type, Path(directory))}", flush=True)


if __name__ == "__main__":
    main()
