"""What this machine can run, what is missing, and how to get it. The command line prints it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ci import actionlint, bootstrap, environment, targets

State = Literal["ok", "limited", "missing"]
RANK_GB = 1.0  # resident memory of one rank with torch and DeepSpeed imported, rounded up
PROBE_SECONDS = 120  # a busy machine may need most of a minute to import torch


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Args:
        state: ok; limited: it works, with something that cannot be done; missing: cases cannot run for the want of it.
        meaning: what was found and what follows, one line.
        remedy: how to get it; empty when the state is ok.
    """

    name: str
    state: State
    meaning: str
    remedy: str = ""


def checks() -> list[Check]:
    """Look at everything; takes some seconds, since a process group is really started. Never raises."""
    tests: tuple[Callable[[], Check], ...] = (
        *(_python, _torch, _default_target, _gloo, _gpus, _cores, _memory, _cache, _git, _pip),
        *(_asv, _modal, _actionlint),
    )
    return [_safely(test) for test in tests]


def _safely(test: Callable[[], Check]) -> Check:
    try:
        return test()
    except Exception as error:  # noqa: BLE001 (a doctor that falls ill tells nothing)
        return Check(test.__name__.strip("_"), "limited", f"could not be looked at: {type(error).__name__}: {error}")


def _python() -> Check:
    here = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    if sys.version_info < bootstrap.OLDEST_PYTHON:
        return Check("Python", "missing", f"{here}; 3.10 or newer is needed", "install one; PYTHON=python3.11 ci/setup")
    return Check("Python", "ok", here)


def _torch() -> Check:
    names = [d for d in importlib.metadata.distributions() if (d.metadata["Name"] or "").lower() == "torch"]
    places = {str(d.locate_file("")) for d in names}
    if not names:
        return Check("torch", "missing", "not installed; nothing can run", "ci/setup")
    version = names[0].version
    if len(places) > 1:
        return Check(
            "torch", "missing", f"{len(places)} are installed: {', '.join(sorted(places))}", "remove .venv; ci/setup"
        )
    if version.partition("+")[0] != bootstrap.TORCH:
        return Check("torch", "limited", f"{version}; tiebench is checked with {bootstrap.TORCH}", "ci/setup")
    return Check("torch", "ok", f"{version}, once")


def _default_target() -> Check:
    try:
        found = targets.default_target()
    except targets.TargetError as error:
        return Check("DeepSpeed", "missing", str(error), "ci/setup")
    if found.unmet:
        return Check("DeepSpeed", "limited", f"{found.label}: {'; '.join(found.unmet)}", "ci/setup")
    return Check("DeepSpeed", "ok", f"{found.label}; others with --target")


_GLOO = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
x = torch.ones(3); dist.all_reduce(x); dist.destroy_process_group()
assert x.tolist() == [1.0, 1.0, 1.0]
"""

_CUDA = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "built": torch.version.cuda,
    "names": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if there else [],
    "nccl": torch.distributed.is_nccl_available(),
}))
"""


def _probe(script: str, *arguments: str) -> tuple[str | None, str]:
    """Output of a Python script in a process of its own (None: it failed), and the last line of its complaint."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {PROBE_SECONDS} s"
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return (done.stdout if done.returncode == 0 else None), said[-1]


def _gloo() -> Check:
    with tempfile.TemporaryDirectory() as directory:
        out, said = _probe(_GLOO, str(Path(directory) / "store"))
    if out is None:
        remedy = "check that the loopback interface `lo` is up and /tmp is writable; ci/setup for torch"
        return Check("gloo", "missing", f"a process group on CPU does not start: {said}", remedy)
    return Check("gloo", "ok", "a process group on CPU starts: the CPU plans can run")


def _gpus() -> Check:
    out, said = _probe(_CUDA)
    if out is None:
        return Check("GPUs", "limited", f"torch cannot be asked: {said}", "ci/setup")
    facts = json.loads(out)
    names = facts["names"]
    if names and facts["nccl"]:
        state: State = "ok" if len(names) > 1 else "limited"
        more = "" if len(names) > 1 else "; cases of 2 or more ranks need as many GPUs, so they run on CPU"
        return Check("GPUs", state, f"{len(names)} ({', '.join(sorted(set(names)))}), NCCL{more}")
    if names:
        return Check("GPUs", "limited", f"{len(names)}, but torch has no NCCL", "a CUDA build of torch for Linux")
    if shutil.which("nvidia-smi"):
        built = f"built for CUDA {facts['built']}" if facts["built"] else "a CPU build"
        remedy = (
            "ci/setup with an index that has torch's CUDA build (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL), or a newer driver"
        )
        return Check(
            "GPUs", "limited", f"there is an NVIDIA driver, but torch ({built}) finds no GPU: CPU only", remedy
        )
    return Check("GPUs", "limited", "none: cases run on CPU with gloo", "a machine with NVIDIA GPUs, or Modal")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cores() -> Check:
    cores = _usable_cores()
    if cores >= 4:
        return Check("cores", "ok", f"{cores}: enough for 4 ranks")
    if cores >= 2:
        return Check("cores", "limited", f"{cores}: 2 ranks run at full speed, 4 ranks share cores", "4 cores")
    return Check("cores", "limited", "1: all ranks share it; times mean little and limits may be hit", "2 or 4 cores")


def _memory() -> Check:
    gigabytes = environment.memory_bytes() / 2**30
    for ranks, state in ((4, "ok"), (2, "limited")):
        if gigabytes >= ranks * RANK_GB + 1:
            remedy = "" if state == "ok" else f"{4 * RANK_GB + 1:g} GB for 4 ranks"
            return Check("memory", state, f"{gigabytes:.0f} GB: enough for {ranks} ranks", remedy)  # type: ignore[arg-type]
    return Check("memory", "missing", f"{gigabytes:.1f} GB: too little for 2 ranks", f"{2 * RANK_GB + 1:g} GB")


def _cache() -> Check:
    place = targets.cache_directory()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return Check("cache", "limited", f"{place} cannot be written: no --target", "set TIEBENCH_CACHE to a directory")
    free = shutil.disk_usage(there).free / 1e9
    if free < 1:
        return Check("cache", "limited", f"{place}: {free:.1f} GB free; a target takes 0.1 GB", "free some disk space")
    return Check("cache", "ok", f"{place}, {free:.0f} GB free")


def _git() -> Check:
    if shutil.which("git"):
        return Check("git", "ok", "there: targets from git URLs, commits in records")
    return Check("git", "limited", "not there: no targets from git URLs, no commits in records", "install git")


def _pip() -> Check:
    if importlib.util.find_spec("pip") and importlib.util.find_spec("setuptools"):
        return Check("pip", "ok", f"{importlib.metadata.version('pip')}, with setuptools: --target works")
    return Check("pip", "limited", "pip or setuptools is not installed here: no --target", "ci/setup")


def _asv() -> Check:
    if not importlib.util.find_spec("asv"):
        return Check("asv", "limited", "not installed: no benchmark history", "ci/setup")
    file = Path("~/.asv-machine.json").expanduser()
    try:
        known = platform.node() in json.loads(file.read_text())
    except (OSError, ValueError):
        known = False
    if not known:
        return Check("asv", "limited", f"{file} does not know this machine: `asv run` asks", "asv machine --yes")
    return Check("asv", "ok", f"{importlib.metadata.version('asv')}, knows this machine")


def _modal() -> Check:
    if not importlib.util.find_spec("modal"):
        return Check("Modal", "limited", "client not installed: no runs on Modal", "ci/setup")
    version = importlib.metadata.version("modal")
    config = Path(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml").expanduser()
    in_environment = bool(os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET"))
    if not in_environment and not config.is_file():
        return Check("Modal", "limited", f"client {version}, no token: no runs on Modal", "modal token new")
    where = "environment" if in_environment else str(config)
    return Check("Modal", "ok", f"client {version}, token from {where} (not tried)")


def _actionlint() -> Check:
    command = actionlint.find()
    if command is None:
        remedy = "ci/setup with network; or install npm or actionlint, remove .venv, then ci/setup"
        return Check("actionlint", "limited", f"{actionlint.why_missing()}: workflow files are not checked", remedy)
    return Check("actionlint", "ok", " ".join(command))
