"""Arithmetic: TF32 as hardware rounds it, what a process really multiplies in, and switches that can always be read."""

from __future__ import annotations

import pytest
import torch

from suites.precision import Tf32Matmul, measured_matmul, multiplying, switches, switches_told, to_tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("matmul", ["ieee", "tf32", "tf32_truncated"])
def test_what_is_asked_for_is_what_is_measured(matmul):
    with multiplying(matmul, CPU):
        assert measured_matmul(CPU) == matmul
        assert switches(CPU)["matmul (measured)"] == matmul
    assert measured_matmul(CPU) == "ieee"


def test_tf32_has_ten_mantissa_bits_rounded_to_even_or_cut():
    ulp = 2.0**-10
    x = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.6 * ulp, -1 - 0.6 * ulp, 0.0, float("inf"), float("nan")])
    assert to_tf32(x)[:6].tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1 - ulp, 0, float("inf")]
    assert to_tf32(x, truncated=True)[:4].tolist() == [1, 1 + ulp, 1, -1]
    assert bool(to_tf32(x).isnan()[6])


def test_forward_and_backward_products_are_rounded_and_nothing_else():
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    upstream = torch.randn(3, 4)
    with Tf32Matmul():
        y = torch.nn.functional.linear(x, w)
        y.backward(upstream)
    assert torch.equal(y, to_tf32(x.detach()) @ to_tf32(w.detach()).T)
    assert torch.equal(w.grad, to_tf32(upstream).T @ to_tf32(x.detach()))
    with Tf32Matmul():
        assert torch.equal(x.detach() + 2.0**-20, x.detach().add(2.0**-20))


@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
def test_switches_can_be_read_while_cuda_s_tf32_is_set(matmul):
    """torch refuses to read TF32's older switch while the newer one says otherwise; no device is needed to see that."""
    before = torch.backends.cuda.matmul.fp32_precision
    with multiplying(matmul, CUDA):
        assert switches_told(CUDA)["cuda.matmul.fp32_precision"] == matmul
    assert torch.backends.cuda.matmul.fp32_precision == before
    with pytest.raises(ValueError, match="CPU only"), multiplying("tf32_truncated", CUDA):
        pass
