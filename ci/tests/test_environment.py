"""Environment, its fingerprint, and the doctor."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from ci import doctor, environment


@pytest.fixture(scope="module")
def here():
    return environment.collect("cpu")


def test_collect_is_json_and_names_what_computes(here):
    assert json.loads(json.dumps(here)) == here
    assert here["torch"]["version"] == torch.__version__
    assert here["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # "+cu130" is not in both
    assert here["threads"]["intra_op"] == torch.get_num_threads()
    assert here["machine"]["cpu"]["model"]
    assert here["frameworks"]["deepspeed"]["version"] == here["packages"]["deepspeed"]
    assert any("BUILD_TYPE" in line for line in here["torch"]["build"])


def test_collect_twice_has_one_fingerprint(here):
    assert environment.fingerprint(environment.collect(torch.device("cpu"))) == environment.fingerprint(here)
    assert environment.difference(here, json.loads(json.dumps(here))) == []


def test_a_precision_switch_changes_the_fingerprint(here):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        changed = environment.collect("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    assert environment.fingerprint(changed) != environment.fingerprint(here)
    keys = {key: (a, b) for key, a, b in environment.difference(here, changed)}
    assert keys["precision.float32_matmul_precision"] == (before, "medium")


def test_flush_denormal_is_measured(here):
    assert here["precision"]["flush_denormal"] is False
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert environment.collect("cpu")["precision"]["flush_denormal"] is True
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("keys", "value", "counts"),
    [
        (("packages", "numpy"), "0.0", True),
        (("device", "driver"), "999.1", True),
        (("threads", "intra_op"), 99, True),
        (("variables", "LD_LIBRARY_PATH"), "/opt/other", True),
        (("variables", "OMP_NUM_THREADS"), "7", True),
        (("tiebench", "commit"), "0" * 40, False),
        (("packages", "tiebench"), "9", False),
        (("machine", "name"), "elsewhere", False),
        (("tiebench", "directory"), "/elsewhere", False),
        (("frameworks", "deepspeed", "file"), "/elsewhere", False),
        (("variables", "TORCH_HOME"), "/elsewhere", False),
    ],
)
def test_what_the_fingerprint_is_over(here, keys, value, counts):
    other = copy.deepcopy(here)
    inner = other
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert (environment.fingerprint(other) != environment.fingerprint(here)) is counts


def test_difference_names_entries_of_one_side(here):
    other = copy.deepcopy(here)
    del other["packages"]["numpy"]
    other["packages"]["zzz"] = "1"
    other["tiebench"]["commit"] = "f" * 40
    assert environment.difference(here, other) == [
        ("packages.numpy", here["packages"]["numpy"], None),
        ("packages.zzz", None, "1"),
        ("tiebench.commit", here["tiebench"]["commit"], "f" * 40),
    ]


def test_variables_are_allow_listed_and_secrets_redacted():
    environ = {
        "OMP_NUM_THREADS": "1",
        "HOME": "/home/x",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "TORCH_HUB_TOKEN": "s3cret",
        "NVIDIA_API_KEY": "s3cret",
        "DS_ACCELERATOR": "cpu",
    }
    seen = environment.variables(environ)
    assert seen == {
        "DS_ACCELERATOR": "cpu",
        "NVIDIA_API_KEY": "(redacted)",
        "OMP_NUM_THREADS": "1",
        "TORCH_HUB_TOKEN": "(redacted)",
    }


def test_importing_the_module_does_not_import_torch():
    script = "import sys, ci.environment; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    root = environment.Path(environment.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0


def test_commit_tells_a_dirty_work_tree(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert environment.commit(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    clean = environment.commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "a").write_text("2")
    assert environment.commit(tmp_path) == clean + "+dirty"


def test_doctor_looks_at_this_machine(monkeypatch):
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-visible")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-visible")
    found = {check.name: check for check in doctor.checks()}
    assert found["gloo"].state == "ok", found["gloo"]
    assert found["torch"].state == "ok", found["torch"]
    assert found["DeepSpeed"].state == "ok", found["DeepSpeed"]
    assert found["Modal"].state == "ok"
    assert all(check.remedy for check in found.values() if check.state == "missing")
    assert "visible" not in repr(found)


def test_doctor_survives_a_broken_check(monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_modal", broken)
    monkeypatch.setattr(doctor, "_gloo", lambda: doctor.Check("gloo", "ok", ""))
    monkeypatch.setattr(doctor, "_gpus", lambda: doctor.Check("GPUs", "ok", ""))
    found = doctor.checks()
    assert [check.state for check in found if "no such thing" in check.meaning] == ["limited"]


def test_doctor_tells_a_process_group_that_does_not_start(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface0")
    check = doctor._gloo()
    assert check.state == "missing"
    assert "nosuchinterface0" in check.meaning or "interface" in check.meaning.lower()
