"""Diagnosis: the class of a fault among the first two guesses, a plain sentence, and never an exception."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from suites import diagnosis, symptoms
from suites.bug_classes import NAMES
from suites.cases import Case
from suites.diagnosis import Diagnosis, diagnose
from suites.evidence import Evidence
from suites.faults import FAULTS
from suites.observe import Piece, RankObservation
from suites.oracles import Finding
from suites.reference import ReferenceCache
from suites.rules import RULES, guesses
from suites.symptoms import Symptoms
from suites.trace import CLEAN
from suites.verdict import judge

RUNNABLE = [f for f in FAULTS.values() if f.path == "handwritten" and "hang" not in f.caught_by]
# One fault of every class, the last: the whole table takes minutes, and `tiebench faults` runs it.
OF_EVERY_CLASS = {fault.bug_class: fault for fault in RUNNABLE}
NAMED = tuple(fault.name for fault in OF_EVERY_CLASS.values())
CACHE = ReferenceCache()
SENTENCES = {
    "detached_projection_on_one_rank": "tensor-parallel rank 1's part of the tied weight got no projection gradient",
    "detached_lookup_hidden": "the tied weight got no lookup gradient",
    "missing_dp_reduce": "holds 2 of data-parallel rank 0 and nothing of data-parallel rank 1",
    "frozen_last_shard": "the tied weight did not move on tensor-parallel rank 1",
    "norm_counts_replicas": "the norm counts replicated weights once a rank",
    "ignored_labels_count": "ignored labels count in the mean",
    "global_padding_idx": "1 of 67 rows (the rows with the padding row's number on their shard",
}
CASE = Case("handwritten", head="row", hidden=35)


@pytest.fixture(scope="module")
def diagnosed(run_jobs):
    found = {}
    wanted = {name: FAULTS[name] for name in (*NAMED, *SENTENCES)}
    jobs = [(fault.case, name) for name, fault in wanted.items()]
    for (case, name), ranks in zip(jobs, run_jobs(jobs), strict=True):
        found[name] = of(Case.parse(case), ranks)
    return found


@pytest.fixture(scope="module")
def row_run(run_jobs):
    return run_jobs([(CASE.id, None)])[0]


def of(case: Case, ranks: list[RankObservation]) -> Diagnosis:
    findings = judge(case, ranks, CACHE).findings
    try:
        return diagnose(Evidence(case, ranks, CACHE), findings)
    except Exception as error:  # noqa: BLE001 - two ranks in one place: no evidence
        return diagnose(None, (Finding("complete", True, str(error)),))


def test_the_class_is_among_the_first_two_guesses(diagnosed):
    two = {name: [g.bug_class for g in diagnosed[name].guesses[:2]] for name in NAMED}
    wrong = {name: found for name, found in two.items() if FAULTS[name].bug_class not in found}
    assert len(wrong) <= 0.1 * len(two), wrong
    first = [name for name, found in two.items() if found[:1] == [FAULTS[name].bug_class]]
    assert len(first) >= 0.7 * len(two)


@pytest.mark.parametrize("name", NAMED)
def test_a_sentence_names_the_first_guess(name, diagnosed):
    found = diagnosed[name]
    assert f"looks like class {found.guesses[0].bug_class} (" in found.sentence
    assert found.guesses[0].name == NAMES[found.guesses[0].bug_class]
    assert [g.weight for g in found.guesses] == sorted((g.weight for g in found.guesses), reverse=True)
    assert "nan" not in found.sentence


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_say_what_is_wrong_where(name, diagnosed):
    assert SENTENCES[name] in diagnosed[name].sentence


def test_rows_are_those_that_carry_the_error(diagnosed):
    padded = diagnosed["global_padding_idx"]
    assert (padded.tensor, padded.worst_rows, padded.lie.split(", ")[0]) == (
        "embed_tokens.weight",
        (37,),
        "the rows with the padding row's number on their shard",
    )
    assert padded.share_of_rows == pytest.approx(1 / 67)


def test_nothing_flagged_is_nothing_to_diagnose(row_run):
    found = of(CASE, row_run)
    assert (found.guesses, found.sentence) == ((), "nothing is flagged")


def changed(ranks: list[RankObservation], kind: str, name: str, change) -> list[RankObservation]:
    """The run with one tensor of its second step changed on every rank; tied names both where one of them is."""

    def one(rank: RankObservation) -> RankObservation:
        steps = list(rank.steps)
        held = dict(getattr(steps[1], kind))
        held[name] = change(held[name])
        steps[1] = dataclasses.replace(steps[1], **{kind: held})
        return dataclasses.replace(rank, steps=tuple(steps))

    return [one(rank) for rank in ranks]


def scaled(factor: float):
    return lambda piece: Piece(piece.data * factor, piece.start, piece.local_shape)


BAD = {
    "nan": ("gradients", scaled(math.nan), "no number"),
    "inf": ("gradients", scaled(math.inf), "no number"),
    "zero": ("gradients", scaled(0.0), "got no gradient"),
    "shape": ("gradients", lambda piece: Piece.whole(torch.zeros(3, 5)), "do not add up"),
    "weights that are no number": ("weights", scaled(math.nan), "looks like class"),
    "weights of another shape": ("weights", lambda piece: Piece.whole(torch.zeros(2)), "do not add up"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_have_a_sentence_of_their_own(name, row_run):
    kind, change, text = BAD[name]
    found = of(CASE, changed(row_run, kind, "layers.0.up_proj.weight", change))
    assert text in found.sentence
    assert found.guesses


def test_lost_ranks_and_steps_are_class_30(row_run):
    for ranks in (row_run[:1], [dataclasses.replace(r, steps=r.steps[:2]) for r in row_run], [row_run[0], row_run[0]]):
        found = of(CASE, ranks)
        assert found.guesses[0].bug_class == 30
        assert not found.sentence.startswith("no diagnosis")


def test_a_failure_becomes_a_sentence(row_run, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(diagnosis, "guesses", broken)
    found = diagnose(Evidence(CASE, row_run, CACHE), (Finding("gradient", True, "off", 1.0, 1.0, "", 1),))
    assert found.sentence.startswith("no diagnosis: RuntimeError: odd (broken")
    assert found.guesses == ()


def test_a_symptom_that_cannot_be_measured_leaves_the_others(row_run, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(symptoms, "portraits", broken)
    ranks = changed(row_run, "gradients", "norm.weight", scaled(2.0))
    found = of(CASE, ranks)
    assert found.guesses
    assert "norm.weight" in found.sentence


def test_the_traced_boundary_is_part_of_the_sentence(row_run):
    ranks = changed(row_run, "gradients", "norm.weight", scaled(2.0))
    findings = judge(CASE, ranks, CACHE).findings
    found = diagnose(Evidence(CASE, ranks, CACHE), findings, CLEAN)
    assert CLEAN.sentence in found.sentence
    assert found.boundary is CLEAN


def test_every_rule_speaks_for_known_classes_in_words():
    for rule in RULES:
        assert set(rule.classes) <= set(NAMES)
        assert all(weight > 0 for weight in rule.classes.values())
        assert rule.why == rule.why.strip()
    assert {number for rule in RULES for number in rule.classes} == set(NAMES)


def test_no_symptom_no_guess_and_no_exception():
    bare = Symptoms(case=CASE, step=0, flagged=frozenset(), evidence={})
    assert guesses(bare) == ()
