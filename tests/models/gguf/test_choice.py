"""The quantisation after a name chooses one GGUF model."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.choice import choose_encoder, choose_gguf, quantization_of
from chairlift.models.loader import resolve_model_dir

NAMES = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m.IQ4_XS.gguf", "m-f16.gguf", "mmproj-F16.gguf"]
NAMES += ["x/m-Q8_0-00002-of-00002.gguf", "x/m-Q8_0-00001-of-00002.gguf", "README.md"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("latest", ["m-Q4_K_M.gguf"]),
        ("q2_k", ["m-Q2_K.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("iq4_xs", ["m.IQ4_XS.gguf"]),
        ("F16", ["m-f16.gguf"]),
        ("m-f16.gguf", ["m-f16.gguf"]),
        ("Q8_0", ["x/m-Q8_0-00001-of-00002.gguf", "x/m-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_a_quantisation_chooses_the_files_of_one_model(wanted: str | None, found: list[str]) -> None:
    assert choose_gguf(NAMES, wanted, "here") == found


def test_what_cannot_be_chosen_is_refused_with_the_choices() -> None:
    with pytest.raises(ModelLoadError, match="here has no GGUF file of the kind 'Q3_K'; it has F16, IQ4_XS, Q2_K"):
        choose_gguf(NAMES, "Q3_K", "here")
    with pytest.raises(ModelLoadError, match="has 2 GGUF models of the kind 'Q8_0'; name one of them: a-Q8_0, b-Q8_0"):
        choose_gguf(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "here")
    with pytest.raises(ModelLoadError, match="here has no GGUF files"):
        choose_gguf(["model.safetensors"], "Q8_0", "here")
    assert choose_gguf(["a-Q5_0.gguf", "b-Q3_K.gguf"], None, "here") == ["a-Q5_0.gguf"]


def test_an_encoder_in_16_bits_is_preferred() -> None:
    assert choose_encoder(["mmproj-BF16.gguf", "mmproj-F16.gguf", "a.gguf"]) == ["mmproj-F16.gguf"]
    assert choose_encoder(["x-mmproj.gguf"]) == ["x-mmproj.gguf"] and choose_encoder(NAMES[:3]) == []


def test_a_file_without_a_quantisation_in_its_name_has_its_own_name() -> None:
    assert (quantization_of("a/model"), quantization_of("gpt-oss-20b-mxfp4")) == ("model", "MXFP4")


def test_a_directory_takes_a_quantisation_too(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).touch()
    assert resolve_model_dir(f"{tmp_path}:q8_0") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match=r"has no GGUF file of the kind 'F16'; it has Q4_0, Q8_0"):
        resolve_model_dir(f"{tmp_path}:F16")
