"""Arithmetic: unit roundoffs, TF32 (real on CUDA, emulated on CPU), and the numerics switches of a live process.

TF32 exists on CUDA only: on a CPU the switches are accepted and change nothing. `Tf32Matmul` emulates it for any model
by rounding the inputs of every matrix product, forward and backward, to 10 mantissa bits. What a process really does is
measured with one product of matrices (`measured_matmul`), not believed from its switches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suites.cases import Case

# Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "tf32_truncated": 2.0**-10,  # cut, not rounded: the whole distance
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
LOW = ("bfloat16", "float16")  # trained with fp32 master weights and fp32 sums of gradients
LOSS_SCALE = {"float16": 1024.0}  # a power of two: keeps small gradients of fp16 from becoming zero
MATMUL, AUTOCAST = "matmul (measured)", "autocast"  # the switches that decide
MANTISSA = {23: "ieee", 10: "tf32", 7: "bf16"}  # bits that a product keeps of its inputs -> name

# Environment variables that change numbers without a trace in torch's own switches.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO", "NCCL_PROTO", "MKL_CBWR",
)  # fmt: skip


def arithmetic(case: Case) -> str:
    """Name of the case's arithmetic, a key of `UNIT_ROUNDOFF`."""
    return case.dtype if case.matmul == "ieee" else case.matmul


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 2**-24 for fp32, 2**-53 for fp64."""
    return torch.finfo(dtype).eps / 2


def master_dtype(case: Case) -> torch.dtype:
    """Precision of master weights, gradient sums and optimizer: fp32 under a lower precision, else the case's own."""
    return torch.float32 if case.dtype in LOW else getattr(torch, case.dtype)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or as it is in fp32 and fp64: for sums that low precision must not make."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def to_tf32(tensor: Tensor, *, truncated: bool = False) -> Tensor:
    """An fp32 tensor with 10 mantissa bits: rounded to nearest, ties to even; or cut."""
    bits = tensor.contiguous().view(torch.int32)
    if not truncated:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    # Infinities and NaN stay what they are.
    return torch.where(torch.isfinite(tensor), (bits & ~0x1FFF).view(torch.float32), tensor)


class Tf32Matmul(TorchDispatchMode):
    """Products of fp32 matrices take their inputs in TF32 and add in fp32, in forward and backward, while it is on."""

    PRODUCTS: Mapping[Any, tuple[int, int]] = {  # operator -> which arguments are multiplied
        torch.ops.aten.mm: (0, 1),
        torch.ops.aten.bmm: (0, 1),
        torch.ops.aten.addmm: (1, 2),
        torch.ops.aten.baddbmm: (1, 2),
    }

    def __init__(self, *, truncated: bool = False):
        super().__init__()
        self.truncated = truncated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        places = self.PRODUCTS.get(func.overloadpacket)
        if places and args[places[0]].dtype == torch.float32:
            args = list(args)
            for place in places:
                args[place] = to_tf32(args[place], truncated=self.truncated)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def multiplying(matmul: str, device: torch.device) -> Iterator[None]:
    """Multiply fp32 matrices as a case's `matmul` says until the block ends, on this device.

    Raises:
        ValueError: truncation to TF32 on CUDA, where the hardware decides how it rounds.
    """
    if device.type == "cuda":
        if matmul == "tf32_truncated":
            raise ValueError("matmul=tf32_truncated is emulated, on CPU only: run it with --device cpu")
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if matmul == "tf32" else "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
    elif matmul == "ieee":
        yield
    else:
        with Tf32Matmul(truncated=matmul == "tf32_truncated"):
            yield


def measured_matmul(device: torch.device) -> str:
    """How this process multiplies fp32 matrices at this moment, from one product: ieee, tf32, tf32_truncated, bf16.

    The diagonal of ``diag(1 + 2**-k) @ I`` keeps the terms 2**-k that survive the rounding of the inputs; the entry
    ``1 + 3 * 2**-12`` becomes 1 where TF32 is cut and ``1 + 2**-10`` where it is rounded.
    """
    size = 256  # large enough for the kernels that use TF32
    exponents = torch.arange(1, 24, dtype=torch.float64)
    diagonal = torch.ones(size, dtype=torch.float64)
    diagonal[:23] += 2.0**-exponents
    diagonal[23] += 3 * 2.0**-12
    product = (diagonal.float().to(device).diag() @ torch.eye(size, device=device)).diag().double().cpu()
    bits = int((product[:23] > 1).sum())
    if bits == 10 and product[23] == 1:
        return "tf32_truncated"
    return MANTISSA.get(bits, f"{bits} bits")


def switches(device: torch.device) -> dict[str, str]:
    """Everything that changes numbers in this process, measured or read back from it: name -> value."""
    return {
        MATMUL: measured_matmul(device),
        "subnormals (measured)": "kept" if bool(torch.full((1,), 1e-40) * 1 > 0) else "flushed to zero",
        **switches_told(device),
    }


def switches_told(device: torch.device) -> dict[str, str]:
    """What torch and the environment say of themselves, which no device is needed for."""
    found = {
        "float32_matmul_precision": _called(torch.get_float32_matmul_precision),
        "mkldnn.matmul.fp32_precision": _read(torch.backends.mkldnn, "matmul.fp32_precision"),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        AUTOCAST: str(torch.is_autocast_enabled(device.type)),
        "default dtype": str(torch.get_default_dtype()),
    }
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        found |= {
            "cuda.matmul.fp32_precision": _read(matmul, "fp32_precision"),
            "cudnn.conv.fp32_precision": _read(torch.backends.cudnn, "conv.fp32_precision"),
            "cuda.matmul.allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
            "cuda.matmul.allow_fp16_reduced_precision_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
        }
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _read(module: object, path: str) -> str:
    """A switch by its path; torch of other versions may lack it."""
    return _called(lambda: attrgetter(path)(module))


def _called(read: Callable[[], object]) -> str:
    """What a switch says; torch refuses to read one that was set by another name (the two generations of TF32's)."""
    try:
        return str(read())
    except AttributeError:
        return "no such switch"
    except RuntimeError:
        return "set by another name"
