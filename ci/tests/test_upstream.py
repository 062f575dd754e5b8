"""What this tool is for, end to end on real DeepSpeed builds: upstream's history, and a user's own patch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from ci.plans import PLANS
from ci.records import read_run

TIED_ROW = [
    case
    for case in PLANS["smoke"].cases
    if case.path == "deepspeed" and case.tied and case.head == "row" and case.tp > 1
]
PATCH = """
    import torch.nn.functional as F
    from deepspeed.module_inject import layers

    def forward(self, tokens):
        found = F.embedding(tokens, self.weight.detach(), padding_idx=self.padding_idx)
        return layers.GatherFromTensorParallelRegion.apply(self.mp_group, found, self._partition_sizes)

    layers.HiddenParallelEmbedding.forward = forward
"""


def tiebench_run(out, *options):
    command = [sys.executable, "-m", "ci.cli", "run", "--no-known", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done, read_run(out)


def case_options(cases):
    return [word for case in cases for word in ("--case", case.id)]


def test_the_plan_has_what_the_ladder_needs():
    shapes = {(case.hidden, case.zero) for case in TIED_ROW}
    assert {(32, 0), (32, 2), (35, 0), (35, 2)} <= shapes


@pytest.mark.timeout(900)
def test_0_19_5_breaks_the_tie_without_a_word(tmp_path):
    done, run = tiebench_run(tmp_path / "run", "--target", "deepspeed==0.19.5", *case_options(TIED_ROW))
    assert done.returncode == 1
    assert len(run.records) == len(TIED_ROW)
    for record in run.records:
        assert (record.verdict, record.target) == ("bug", "deepspeed==0.19.5"), record.evidence
        assert "tie broken" in record.evidence
        trained_on = any(f.oracle == "gradient" for f in record.findings)
        assert not trained_on or "gradient: " in record.evidence
    assert sum(any(f.oracle == "gradient" and f.flagged for f in r.findings) for r in run.records) >= 4


@pytest.mark.timeout(900)
def test_0_19_6_refuses_with_upstream_s_message(tmp_path):
    done, run = tiebench_run(tmp_path / "run", "--target", "deepspeed==0.19.6", *case_options(TIED_ROW[:3]))
    assert done.returncode == 1
    for record in run.records:
        assert record.verdict == "refused", record.evidence
        assert "NotImplementedError" in record.evidence
        assert "row" in record.evidence.lower()


@pytest.mark.timeout(900)
def test_a_detached_lookup_is_a_bug_in_every_tied_row_case(tmp_path):
    patch = tmp_path / "my_patch.py"
    patch.write_text(textwrap.dedent(PATCH))
    done, run = tiebench_run(tmp_path / "run", "--patch", str(patch), *case_options(TIED_ROW))
    assert done.returncode == 1
    for record in run.records:
        assert record.verdict == "bug", f"{record.case}: {record.evidence}"
        assert "0.000 of the lookup's and 1.000 of the projection's contribution" in record.evidence
        assert record.patch is not None
        assert record.patch.startswith("my_patch.py sha256:")
        assert f"--patch {patch}" in (record.rerun or "")


@pytest.mark.timeout(600)
def test_bf16_is_right_over_zero_and_loses_precision_without_it(tmp_path):
    """DeepSpeed 0.19.8 without ZeRO sums gradients in bf16, and its norm holds one tensor-parallel rank's shards."""
    cases = [f"deepspeed:head=row,dtype=bfloat16,hidden=35,vocab=67,zero={zero}" for zero in (0, 1, 3)]
    _, run = tiebench_run(tmp_path / "run", *(word for case in cases for word in ("--case", case)))
    without, *over_zero = run.records
    assert [record.verdict for record in over_zero] == ["rounding", "rounding"], [r.evidence for r in over_zero]
    assert without.verdict == "bug: precision"
    flagged = {finding.oracle: finding.evidence for finding in without.findings if finding.flagged}
    assert set(flagged) == {"precision", "gradient_norm"}
    assert "summed in torch.bfloat16 and should be in torch.float32" in flagged["precision"]
