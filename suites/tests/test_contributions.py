"""Contributions: the terms add up to the gradient, and a fit finds what a gradient is made of."""

from __future__ import annotations

import pytest
import torch

from suites.cases import Case
from suites.contributions import Fit, Term, Twin, alike, fit, places, portraits, touched
from suites.evidence import Evidence
from suites.faults import FAULTS
from suites.model import EMBEDDING, HEAD, initial_weights
from suites.reference import ReferenceCache, evaluate

FAULTY = (
    "detached_projection_on_one_rank",
    "missing_dp_reduce",
    "overwritten_accumulation",
    "unreduced_gradient_below_head",
    "dp_reduce_over_the_world",
    "gradient_not_cleared",
    "crossed_collectives",
    "padding_idx_on_one_rank",
    "reduced_twice",
)


@pytest.fixture(scope="module")
def painted(run_jobs):
    jobs = [(FAULTS[name].case, name) for name in FAULTY]
    found = {}
    for (case, name), ranks in zip(jobs, run_jobs(jobs), strict=True):
        e = Evidence(Case.parse(case), ranks, ReferenceCache())
        step = min(c.step for c in e.comparisons if not c.deviation.score <= 1)
        found[name] = {p.name: p for p in portraits(e, step)}
    return found


CASES = (
    "handwritten:dp=2,accumulate=2",
    "handwritten:tie=untied,head=row,hidden=35,loss=weighted",
    "handwritten:frozen=body,padding_idx=3,embedding_scale=5.5,logit_scale=2",
)


@pytest.mark.parametrize("text", CASES)
def test_terms_add_up_to_the_gradient_and_so_do_the_shards_of_the_head(text):
    case = Case.parse(text)
    weights = initial_weights(case)
    twin, exact = Twin(case, weights, 1), evaluate(case, weights, 1)
    for name, gradient in exact.gradients.items():
        terms = twin.terms(name)
        assert torch.allclose(sum(terms.values()), gradient, rtol=1e-10, atol=1e-12)
        assert len(terms) == case.dp * case.accumulate * (2 if case.tied and name in (EMBEDDING, HEAD) else 1)
        if (through := twin.through_head(name)) and name not in (EMBEDDING, HEAD):
            assert len(through) == case.tp
            assert torch.allclose(sum(through.values()), gradient, rtol=1e-10, atol=1e-12)


def test_fit_finds_coefficients_and_says_what_it_cannot():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    terms = {Term("lookup", 0, 0): a, Term("projection", 0, 0): 1e-6 * b}
    found = fit(2 * a + 0.5e-6 * b, terms, 1e-5)
    assert list(found.coefficients.values()) == pytest.approx([2, 0.5])
    assert (found.explained, found.degenerate, found.varies) == (True, False, {"part"})
    strange = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    assert not fit(a + strange, terms, 1e-5).explained
    assert fit(a, {Term("lookup", 0, 0): a, Term("projection", 0, 0): 3 * a}, 1e-5).degenerate
    assert not fit(a * float("nan"), terms, 1e-5).explained
    nothing = fit(0 * a, terms, 1e-5)
    assert (nothing.factor, nothing.explained) == (pytest.approx(0), True)


def test_coefficients_are_told_apart_in_proportion():
    assert alike([0.05, 0.05003])
    assert not alike([0.0499, 0.0535])
    assert alike([1e-9, -1e-7])
    assert not alike([0.0, 0.5])
    assert alike([1000.0, 1000.5], 1000.0)
    whole = {Term("whole", dp, micro): 1.0 + micro for dp in range(2) for micro in range(2)}
    assert Fit("terms", whole, 0.0, True, False).varies == {"micro"}


def coefficients(portrait, at: int = 0):
    return {t: round(c, 3) for t, c in portrait.wrong[at].fit.coefficients.items()}


def test_a_contribution_missing_on_one_rank(painted):
    found = painted["detached_projection_on_one_rank"][HEAD]
    assert [s.wrong for s in found.slices] == [False, True]
    assert coefficients(found) == {Term("lookup", 0, 0): 1, Term("projection", 0, 0): 0}
    assert found.rows.shard == 1


def test_each_copy_holds_its_own_data(painted):
    found = painted["missing_dp_reduce"]["norm.weight"]
    assert [(s.tp_rank, s.dp_rank) for s in found.slices] == [(0, 0), (0, 1)]
    assert coefficients(found, 0) == {Term("whole", 0, 0): 2, Term("whole", 1, 0): 0}
    assert coefficients(found, 1) == {Term("whole", 0, 0): 0, Term("whole", 1, 0): 2}


def test_a_lost_micro_batch(painted):
    found = painted["overwritten_accumulation"]["norm.weight"]
    assert coefficients(found) == {Term("whole", 0, 0): 0, Term("whole", 0, 1): 1}
    assert found.wrong[0].fit.varies == {"micro"}


def test_what_came_through_the_own_shard_of_the_head(painted):
    found = painted["unreduced_gradient_below_head"]["norm.weight"]
    assert [s.fit.family for s in found.wrong] == ["through head"] * 2
    assert [coefficients(found, i) for i in (0, 1)] == [{Term("shard 0", 0, 0): 1}, {Term("shard 1", 0, 0): 1}]


def test_slices_of_all_ranks_averaged(painted):
    found = painted["dp_reduce_over_the_world"][EMBEDDING]
    assert coefficients(found) == {Term("shard 0", 0, 0): 0.5, Term("shard 1", 0, 0): 0.5}


def test_the_step_before_and_another_tensor(painted):
    assert coefficients(painted["gradient_not_cleared"][HEAD])[Term("the step before", 0, 0)] == 1
    crossed = painted["crossed_collectives"]["layers.0.gate_proj.weight"].wrong[0].fit
    assert crossed.family == "other tensor"
    assert any(term.part == "layers.0.up_proj.weight" for term in crossed.coefficients)


def test_rows_and_columns_of_the_padding(painted):
    found = painted["padding_idx_on_one_rank"][EMBEDDING]
    assert found.rows.wrong == (3,)
    assert "the padding row" in found.rows.lie
    assert found.columns.shard == 1


def test_the_projection_by_itself_where_the_lookup_has_no_pattern(painted):
    found = painted["reduced_twice"][HEAD].wrong[0].fit
    assert (found.family, found.factor) == ("projection", pytest.approx(2, rel=1e-3))


def test_rows_are_described(run_jobs):
    case = Case.parse("handwritten:head=vocab,vocab=67,batch=3")
    e = Evidence(case, run_jobs([(case.id, None)])[0], ReferenceCache())
    exact = e.exact[0].gradients[EMBEDDING]

    def lie(*rows: int) -> tuple[str, ...]:
        error = torch.zeros_like(exact)
        error[list(rows)] = 1.0
        return places(e, 0, EMBEDDING, error, exact, 1e-7)[0].lie

    assert "rows at the border of two shards" in lie(33, 34)
    assert "rows that longer shards have beyond the shortest" in lie(33)
    tokens, labels = touched(case, 0)
    free = [row for row in range(67) if row not in tokens | labels]
    assert "rows that no token and no label touches" in lie(*free[:3])
    assert "rows of tensor-parallel rank 1's shard" in lie(40, 50)
    assert lie(*range(67)) == ()
