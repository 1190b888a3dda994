"""GPTQ (Frantar et al., 2022)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.formats.quantize.gptq import Calibrated, CalibrationPack, calibrate, gptq, output_error
from chairlift.models.formats.quantize.recipes import RECIPES
from chairlift.models.formats.quantize.rounding import fitted_scales, nearest_codes, round_rows
from chairlift.models.layers.linear import Linear
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.tiny import tiny_hf_model

BF16 = torch.bfloat16
KINDS = {name: RECIPES[name].layers for name in ("int4", "int4-g32", "int4-g128", "int8")}


def correlated(k: int, samples: int = 2000) -> Tensor:
    """2 X X^T of inputs of which few directions are large."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(k // 4, k, generator=generator)
    inputs = torch.randn(samples, k // 4, generator=generator) @ mix
    inputs += 0.3 * torch.randn(samples, k, generator=generator)
    return 2 * inputs.t() @ inputs


def matrix(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2)) * 0.05


@pytest.mark.parametrize("form", KINDS)
def test_outputs_are_closer_than_of_weights_rounded_to_the_nearest(form: str) -> None:
    weight, hessian, kind = matrix(48, 256), correlated(256), KINDS[form]
    found = output_error(weight, gptq(weight, hessian, kind, BF16), hessian)
    nearest = output_error(weight, round_rows(weight, kind, BF16)[0], hessian)
    assert found < 0.6 * nearest


def test_output_error_is_that_of_the_products() -> None:
    inputs = torch.randn(300, 64, generator=torch.Generator().manual_seed(4))
    weight = matrix(16, 64)
    rows, _ = round_rows(weight, KINDS["int4-g32"], BF16)
    wanted = (inputs @ (weight - rows.dequantize()).t()).square().sum() / (inputs @ weight.t()).square().sum()
    assert output_error(weight, rows, 2 * inputs.t() @ inputs) == pytest.approx(float(wanted), rel=1e-4)
    assert output_error(weight, rows, torch.zeros(64, 64)) == 0


@pytest.mark.parametrize("form", KINDS)
def test_without_correlation_weights_are_rounded_to_the_nearest(form: str) -> None:
    """Inputs that were never there are the case of zeros in the diagonal."""
    weight, kind = matrix(16, 256), KINDS[form]
    diagonal = torch.rand(256, generator=torch.Generator().manual_seed(5)) + 0.1
    diagonal[[3, 200]] = 0
    rows, (wanted, _) = gptq(weight, torch.diag(diagonal), kind, BF16), round_rows(weight, kind, BF16, diagonal)
    assert torch.equal(rows.codes, wanted.codes)
    assert torch.equal(rows.scales, wanted.scales)


def one_at_a_time(weight: Tensor, hessian: Tensor, group: int) -> Tensor:
    """The paper's equations without its tricks: after each column, the inverse loses a row and a column."""
    weight, inverse = weight.double(), hessian.double()
    inverse = torch.linalg.inv(inverse + 0.01 * inverse.diagonal().mean() * torch.eye(len(inverse)))
    found = torch.empty_like(weight)
    scale, zero, kind = torch.empty(0), torch.empty(0), KINDS["int4-g32"]
    for column in range(weight.shape[1]):
        if column % group == 0:
            ahead, importance = (each[..., column : column + group].float() for each in (weight, hessian.diagonal()))
            scale, zero = (each.double() for each in fitted_scales(ahead, kind, BF16, importance))
        found[:, column] = (nearest_codes(weight[:, column], scale, zero, 4) - zero) * scale
        error = (weight[:, column] - found[:, column]) / inverse[column, column]
        weight = weight - error[:, None] * inverse[column]
        inverse = inverse - inverse[:, column, None] * inverse[column] / inverse[column, column]
    return found.float()


def test_blocks_and_factors_give_what_the_equations_say() -> None:
    weight, hessian = matrix(16, 320), correlated(320)
    found = gptq(weight, hessian, KINDS["int4-g32"], BF16).dequantize()
    wanted = one_at_a_time(weight, hessian, 32)
    same = (found == wanted).float().mean()
    assert same > 0.97, "the last bits of float32 decide few of them"


def test_few_samples_are_enough_for_a_factor() -> None:
    weight = matrix(8, 128)
    inputs = torch.randn(2, 128, generator=torch.Generator().manual_seed(6))
    hessian = 2 * inputs.t() @ inputs
    assert output_error(weight, gptq(weight, hessian, KINDS["int4-g32"], BF16), hessian) < 0.01


def test_inputs_that_are_not_finite_are_refused() -> None:
    hessian = torch.full((32, 32), float("nan"))
    with pytest.raises(ConfigError, match="hidden states on the calibration texts are not finite"):
        gptq(matrix(4, 32), hessian, KINDS["int8"], BF16)


# --- a whole model ---------------------------------------------------------------------------------------------------


def packs(lengths: tuple[tuple[int, ...], ...] = ((30, 17), (25,))) -> list[CalibrationPack]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for pack in lengths:
        offsets = [0]
        for length in pack:
            offsets.append(offsets[-1] + length)
        found.append(CalibrationPack(torch.randint(2, 128, (offsets[-1],), generator=generator), offsets))
    return found


def plain(model_dir: Path) -> CausalLM:
    return load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_each_product_sees_what_those_before_it_make_once_they_are_quantised(tmp_path: Path, family: str) -> None:
    model_dir = tiny_hf_model(tmp_path, family, num_hidden_layers=2, std=0.1)
    kind, shares = KINDS["int4-g32"], list[float]()
    found: list[Calibrated] = list(calibrate(plain(model_dir), packs(), lambda _: kind, BF16, shares.append))
    twin = plain(model_dir)
    products = [f"{n}.weight" for n, m in twin.named_modules() if isinstance(m, Linear) and n != "lm_head"]
    assert [each.parameter for each in found] == products
    assert shares == [0.5, 1.0]
    for each in found:
        linear = twin.get_submodule(each.parameter.removesuffix(".weight"))
        weight = linear.weight.detach().clone()
        seen: list[Tensor] = []
        handle = linear.register_forward_pre_hook(lambda _, inputs, to=seen: to.append(inputs[0]))  # type: ignore[misc]
        for pack in packs():
            twin(pack.token_ids, pack.positions, PackedContext(pack.cu_seqlens))
        handle.remove()
        inputs = torch.cat(seen)
        hessian = 2 * inputs.t() @ inputs
        worth, wanted = each.rows.dequantize(), gptq(weight, hessian, kind, BF16)
        assert (wanted.codes == each.rows.codes).float().mean() > 0.98, each.parameter
        assert each.output_errors is not None
        assert each.output_errors[0] == pytest.approx(output_error(weight, each.rows, hessian), rel=0.01)
        assert each.squares.error == pytest.approx(float((worth - weight).square().sum()), rel=1e-4)
        linear.weight.copy_(worth)
    written, nearest = (sum(each.output_errors[i] for each in found if each.output_errors) for i in range(2))
    assert written < 0.9 * nearest


def test_layers_are_let_go_of(tmp_path: Path) -> None:
    model = plain(tiny_hf_model(tmp_path, "llama"))
    seen = []
    for each in calibrate(model, packs(), lambda _: KINDS["int8"], BF16):
        there = [not layer.mlp.down_proj.weight.is_meta for layer in model.model.layers]
        seen.append((each.parameter.split(".")[2], there))
    assert seen[0] == ("0", [True, True, True])
    assert seen[-1] == ("2", [False, False, True])
