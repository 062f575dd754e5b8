"""Environment of a run: all that can change numerics or speed, as a JSON-ready dict; its fingerprint; what differs.

`collect` runs in a rank, after the case's path has set the process up. `fingerprint` and `difference` need the
standard library only: reports use them. Secrets never get in: environment variables are allow-listed by prefix, and the
values of those whose name looks like a credential are redacted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
FRAMEWORKS = ("deepspeed", "torchtitan", "transformers", "megatron")

PREFIXES = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_", "ROCR_", "HIP_"),
    *("DS_", "DEEPSPEED_", "MALLOC_", "TCMALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH"),
)
SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

# Shown and compared, but no part of the fingerprint: they change neither numerics nor speed, or (tiebench's own commit)
# would make every night a new environment.
_NOT_HASHED = re.compile(
    r"^(schema|tiebench\..*|packages\.tiebench|machine\.(name|memory_gb)|frameworks\..*\.file|"
    r"variables\.\w*_(DIR|HOME|PATH|FILE|ROOT)|variables\.CUDA_VISIBLE_DEVICES|variables\.NVIDIA_VISIBLE_DEVICES)$"
)
_HASHED_ANYWAY = "variables.LD_LIBRARY_PATH"  # decides which libraries compute

_SIMD = re.compile(r"^(avx|amx|fma|sse4|bf16|f16c|sve|asimd|neon|bfloat|i8mm)")


def collect(device: Any) -> dict[str, Any]:
    """What this process computes with.

    Args:
        device: a ``torch.device`` or its name: the one that the case runs on.
    """
    import torch  # noqa: PLC0415 (reports import this module)

    device = torch.device(device)
    return {
        "schema": SCHEMA,
        "device": _device(torch, device),
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "torch": {
            "version": torch.__version__,
            "commit": torch.version.git_version,
            "debug": torch.version.debug,
            "build": _lines(torch.__config__.show()),
            "parallel": _lines(torch.__config__.parallel_info()),
        },
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
        },
        "precision": _precision(torch),
        "machine": _machine(torch),
        "frameworks": {name: facts for name in FRAMEWORKS if (facts := _framework(name))},
        "packages": packages(),
        "variables": variables(os.environ),
        "tiebench": _tiebench(),
    }


def fingerprint(environment: Mapping[str, Any]) -> str:
    """12 hex digits: equal for environments in which the same numerics and speed are to be expected."""
    facts = sorted((key, value) for key, value in _flat(environment) if _is_hashed(key))
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """What differs: ``(key, value in a, value in b)``, ordered by key; None where one has no such value.

    Keys are dotted (``packages.numpy``). Pure places (directories, the machine's name) are left out.
    """
    left, right = ({key: value for key, value in _flat(e) if _is_compared(key)} for e in (a, b))
    keys = sorted(left.keys() | right.keys())
    return [(key, _text(left, key), _text(right, key)) for key in keys if _text(left, key) != _text(right, key)]


def _is_compared(key: str) -> bool:
    return _is_hashed(key) or key in ("tiebench.version", "tiebench.commit")


def _text(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def _is_hashed(key: str) -> bool:
    return key == _HASHED_ANYWAY or not _NOT_HASHED.match(key)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def packages() -> dict[str, str]:
    """Every installed distribution: name -> version, with the commit where it was built from one.

    Of two with one name the first on ``sys.path`` counts, as it does for `import`: a target's before `.venv`'s.
    """
    found: dict[str, str] = {}
    for item in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower()
        if not name or name in found:
            continue
        try:
            commit = json.loads(item.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
        except ValueError:
            commit = None
        found[name] = f"{item.version} ({commit})" if commit else item.version
    return dict(sorted(found.items()))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that can matter, sorted; values of credentials redacted."""
    relevant = sorted(name for name in environ if name.startswith(PREFIXES))
    return {name: "(redacted)" if SECRET.search(name) else environ[name] for name in relevant}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _device(torch: Any, device: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": device.type}
    if device.type != "cuda":
        facts["name"] = _cpu()["model"]
        return facts
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    facts |= {
        "name": torch.cuda.get_device_name(device),
        "all": [p.name for p in properties],
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 2**30),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _read(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "driver": _driver(),
    }
    return facts


def _driver() -> str | None:
    out = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0].strip() if out else None


def _precision(torch: Any) -> dict[str, Any]:
    """Every switch of torch that changes how numbers are computed; None where this build has no such switch."""
    tiny = torch.full((1,), 1e-310, dtype=torch.float64)
    backends = torch.backends
    readers = {
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "flush_denormal": lambda: bool((tiny * 1.0).item() == 0.0),  # torch can set it, not tell it
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "cuda_matmul_allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cuda_matmul_fp16_reduced": lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda_matmul_bf16_reduced": lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuda_matmul_fp16_accumulation": lambda: backends.cuda.matmul.allow_fp16_accumulation,
        "cuda_preferred_blas": lambda: str(backends.cuda.preferred_blas_library()),
        "cudnn_enabled": lambda: backends.cudnn.enabled,
        "cudnn_allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cudnn_deterministic": lambda: backends.cudnn.deterministic,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "mkldnn_enabled": lambda: backends.mkldnn.enabled,
        "mkldnn_available": backends.mkldnn.is_available,
        "mkldnn_deterministic": lambda: backends.mkldnn.deterministic,
        "mkldnn_allow_tf32": lambda: backends.mkldnn.allow_tf32,
        "fp32_precision": lambda: backends.fp32_precision,
        "fp32_precision_cuda_matmul": lambda: backends.cuda.matmul.fp32_precision,
        "fp32_precision_cudnn": lambda: backends.cudnn.fp32_precision,
        "fp32_precision_cudnn_conv": lambda: backends.cudnn.conv.fp32_precision,
        "fp32_precision_mkldnn": lambda: backends.mkldnn.fp32_precision,
        "fp32_precision_mkldnn_matmul": lambda: backends.mkldnn.matmul.fp32_precision,
        "sdp_flash": backends.cuda.flash_sdp_enabled,
        "sdp_memory_efficient": backends.cuda.mem_efficient_sdp_enabled,
        "sdp_math": backends.cuda.math_sdp_enabled,
        "sdp_cudnn": backends.cuda.cudnn_sdp_enabled,
    }
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Any) -> Any:
    try:
        return reader()
    except AttributeError:
        return None
    except (RuntimeError, AssertionError) as error:
        # torch refuses to tell the old TF32 switch once the new one was set otherwise: a fact worth recording
        return f"unreadable: {str(error).splitlines()[0][:160]}"


def _machine(torch: Any) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "name": platform.node(),
        "system": platform.system(),
        "distribution": _distribution(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cpu_capability": _read(torch.backends.cpu.get_cpu_capability),
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "cpu_quota": _first_line("/sys/fs/cgroup/cpu.max"),
        "memory_gb": round(memory_bytes() / 2**30),
    }


def memory_bytes() -> int:
    """Memory of this machine, or of the container where that is less; 0 where not known."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    limit = _first_line("/sys/fs/cgroup/memory.max") or ""
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu() -> dict[str, str]:
    facts = {"model": platform.processor() or platform.machine(), "simd": ""}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return facts
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if model:
        facts["model"] = model[1].strip()
    if flags:
        facts["simd"] = " ".join(sorted({flag for flag in flags[1].split() if _SIMD.match(flag)}))
    return facts


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _framework(name: str) -> dict[str, str | None] | None:
    """The framework that `import` gives here, without importing it."""
    module = sys.modules.get(name)
    if module is not None:
        file, version = getattr(module, "__file__", None), getattr(module, "__version__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return None
        file, version = spec.origin, None
    return {"version": version or _installed_version(name), "file": file}


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tiebench() -> dict[str, str | None]:
    root = Path(__file__).resolve().parent.parent
    return {"version": _installed_version("tiebench"), "commit": commit(root), "directory": str(root)}


def commit(root: Path) -> str | None:
    """Git commit of a work tree, with "+dirty" where tracked files have changed; None where there is none."""
    if not (root / ".git").exists():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return head.strip() + ("+dirty" if changed else "") if head else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
