"""Rules: the one table by which symptoms speak for classes of bugs.

To add one: a row in `RULES`: what is seen, for people and as a predicate, and its weight for each class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from suites.bug_classes import NAMES
from suites.cases import Case
from suites.contributions import LOOKUP, PROJECTION, alike
from suites.data import IGNORED, micro_batch
from suites.laws import LAWS, shard_sizes
from suites.model import HEAD, HEAD_BIAS
from suites.symptoms import Symptoms
from suites.updates import COUNT, DECAY, FRESH, LATE, LOW, NEAR, OTHER, RATE, STILL


@dataclass(frozen=True)
class Guess:
    """One class of bug that the symptoms look like.

    Args:
        bug_class: its number in suites/README.md; name: short.
        weight: of the rules that say so, together.
        why: what speaks for it, one sentence.
    """

    bug_class: int
    name: str
    weight: float
    why: str


@dataclass(frozen=True)
class Rule:
    """One row of the table: a symptom, for people and as a predicate, and its weight for each class it speaks for."""

    why: str
    when: Callable[[Symptoms], object]
    classes: Mapping[int, float]


def _is(value: float | None, other: float) -> bool:
    return value is not None and alike([value], other)


def _law(bug_class: int) -> Callable[[Symptoms], object]:
    mine = {law.meaning for law in LAWS if law.bug_class == bug_class}
    return lambda s: bool(mine & set(s.losses))


def _wrong_loss(s: Symptoms) -> bool:
    return s.says("loss") and not s.says("logits")


def _zeros(s: Symptoms, part: str) -> str:
    """Where a contribution is missing: on "all" slices, on "some", or "" on none."""
    values = s.coefficients(part)
    none = [_is(v, 0.0) for v in values]
    others = s.coefficients(LOOKUP if part == PROJECTION else PROJECTION)
    if s.varies != {"part"} or not any(none) or not all(_is(v, 1.0) or _is(v, 0.0) for v in [*values, *others]):
        return ""
    return "all" if all(none) else "some"


def _missing(where: str) -> Callable[[Symptoms], object]:
    return lambda s: where in (_zeros(s, LOOKUP), _zeros(s, PROJECTION))


def _scaled_part(s: Symptoms) -> bool:
    return s.varies == {"part"} and _only(s, "tied") and not _zeros(s, LOOKUP) and not _zeros(s, PROJECTION)


def _by_dp(s: Symptoms) -> bool:
    return "dp_rank" in s.varies


def _own_data_only(s: Symptoms) -> bool:
    """Somebody's copy holds one data-parallel rank's data and nothing of the others'."""
    groups = [list(f.along("dp_rank").values()) for f in s.family("terms")]
    return any(sum(all(not _is(v, 0.0) for v in g) for g in by_rank) == 1 for by_rank in groups if len(by_rank) > 1)


def _one_part_by_dp(s: Symptoms) -> bool:
    return {"part", "dp_rank"} <= s.varies


def _by_tokens(s: Symptoms) -> bool:
    """Micro-batches count in proportion to their tokens: a mean over one number of tokens for all of them."""
    counts = {
        (dp_rank, micro): int((micro_batch(s.case, s.step, micro, dp_rank).labels != IGNORED).sum())
        for dp_rank in range(s.case.dp)
        for micro in range(s.case.accumulate)
    }
    fits = [f for f in s.family("terms") if f.varies & {"dp_rank", "micro"}]
    return bool(fits) and all(
        alike([c / counts[t.dp_rank, t.micro] for t, c in f.coefficients.items()], grain=1e-4) for f in fits
    )


def _everywhere(s: Symptoms, factor: float) -> bool:
    """Every gradient is `factor` times too large or too small."""
    return factor > 1 and s.everything and (_is(s.factor, factor) or _is(s.factor, 1 / factor))


def _tp_times(s: Symptoms) -> bool:
    return s.clean_forward and _power_of_tp(s.top_factor, s.case)


def _power_of_tp(value: float | None, case: Case) -> bool:
    return value is not None and case.tp > 1 and any(_is(value, float(case.tp**n)) for n in range(1, 9))


def _below_head(s: Symptoms) -> bool:
    """The head is right, a gradient below it is wrong."""
    return s.clean_forward and s.top is not None and s.kind(s.top) != "bias" and s.top.name != HEAD


def _lost_below_head(s: Symptoms) -> bool:
    return _below_head(s) and s.case.tp > 1 and not _only(s, "tied", "embedding")


def _at_head(s: Symptoms) -> bool:
    return s.clean_forward and s.top is not None and s.top.name == HEAD and not s.top.wrong[0].fit.explained


def _through_own_shard(s: Symptoms) -> bool:
    return any(len(f.coefficients) < s.case.tp for f in s.family("through head"))


def _mixed(s: Symptoms, value: float) -> bool:
    """Slices hold `value` of every tensor-parallel rank's slice."""
    fits = [f.coefficients for f in s.family("shards") if len(f.coefficients) > 1]
    return any(all(_is(v, value) for v in found.values()) for found in fits)


def _dead_on_some_ranks(s: Symptoms) -> bool:
    return any(p.dim is not None and 0 < sum(x.zero for x in p.slices) < len(p.slices) for p in s.gradients)


def _from_the_loss_on(s: Symptoms) -> bool:
    """The gradient that the loss gives back to the head's output is the first that is wrong."""
    at = s.boundary
    return s.clean_forward and at is not None and (at.module, at.direction) == ("lm_head", "backward")


def _only(s: Symptoms, *kinds: str) -> bool:
    return bool(s.gradients) and s.kinds <= set(kinds)


def _no_number(s: Symptoms) -> bool:
    words = ("nan", "inf", "not finite")
    return any(not x.finite for p in s.gradients for x in p.slices) or any(
        word in s.evidence.get(name, "") for name in ("loss", "logits") for word in words
    )


def _resumed(s: Symptoms) -> bool:
    """The case resumes, and the first step after that (or the state right after it) is the first wrong one."""
    return s.case.resume != "none" and s.step <= 1


def _first_after(s: Symptoms) -> bool:
    """Right after the resumption, and nothing before it: weights are not those that were saved, or the next step."""
    return _resumed(s) and (s.says("update", "replicas") or s.step == 1)


def _recomputed(s: Symptoms) -> bool:
    return s.case.recompute != "none" and s.clean_forward


def _recomputed_factor(s: Symptoms) -> bool:
    return _recomputed(s) and any(f.explained and f.family in ("terms", "projection") for f in s.fits)


def _moves(*causes: str) -> Callable[[Symptoms], bool]:
    return lambda s: any(moved.cause in causes for moved in s.updates)


def _all_move(s: Symptoms, *causes: str) -> bool:
    """Every weight that moves wrongly does so for one of these causes, and it is not just one weight."""
    return len(s.updates) > 1 and all(moved.cause in causes for moved in s.updates)


def _part_of_a_weight(s: Symptoms) -> bool:
    """One shard of a weight, or some of its rows, moves wrongly, the others rightly."""
    told = [m for m in s.updates if m.cause in ("", STILL, LATE)]
    return any(0 < len(m.still) < len(m.ratio) or m.rows.share < 1 or 0 < len(m.wrong) < len(m.ratio) for m in told)


def _norm_alone(s: Symptoms) -> bool:
    return s.says("gradient_norm") and not s.gradients


def _norm(*words: str) -> Callable[[Symptoms], bool]:
    return lambda s: _norm_alone(s) and any(word in law for law in s.norms for word in words)


def _own_norm(s: Symptoms) -> bool:
    return (_norm_alone(s) and s.drift == "norm") or bool(_norm("rank to rank", "own shards")(s))


def _tokens_of_one_shard(s: Symptoms) -> bool:
    """Errors begin only at tokens whose rows one shard holds, or the row before it."""
    if not s.forward or s.forward.everywhere or s.case.head == "row" or s.case.tp == 1:
        return False
    ends = [0, *(sum(shard_sizes(s.case)[: i + 1]) for i in range(s.case.tp))]
    return any(
        all(begin - 1 <= token < end for token in s.forward.first_tokens) for begin, end in itertools.pairwise(ends)
    )


def _padding_token(s: Symptoms) -> bool:
    return s.forward is not None and s.case.padding_idx is not None and s.forward.first_tokens == {s.case.padding_idx}


# Weights: 8 and more, a cause by itself, whatever follows from it; 6 to 7, a signature that hardly anything else has; 3
# to 5, fits; below, possible. A class has its best row's weight, and a tenth of its other rows'.
RULES: tuple[Rule, ...] = (
    # what ran
    Rule("a part of the run is missing, or was not the one asked for", lambda s: s.says("complete"), {30: 10}),
    Rule("the optimizer lacks a parameter", lambda s: s.says("complete") and s.says("census"), {20: 10.5}),
    Rule("the live model is not sharded as the case says", lambda s: s.says("layout") and not s.tie_lost, {30: 10}),
    Rule("the live model is not sharded as the case says", lambda s: s.says("layout") and s.tie_lost, {30: 4}),
    Rule("an observation repeats an earlier one", lambda s: s.repeated, {30: 11}),
    Rule("a rank ran on other data than it was given", lambda s: s.forward and s.forward.whose, {30: 10, 9: 3}),
    Rule("all numbers are those of a case with another factor", lambda s: s.another, {30: 9}),
    Rule("weights move as another optimizer would move them", lambda s: _all_move(s, OTHER), {30: 8}),
    # the tie
    Rule("an untied model has one weight", lambda s: s.says("tie") and not s.case.tied, {3: 10}),
    Rule("the tie was never made", lambda s: s.says("tie") and s.case.tied and not s.tie_lost, {1: 8, 2: 6}),
    Rule("embedding and head are no longer one weight", lambda s: s.tie_lost, {1: 8, 26: 2}),
    Rule("the tie is lost when sharded layers are put in", lambda s: s.tie_lost == "sharded", {2: 9}),
    Rule("the tie is made, and lost at once", lambda s: s.tie_lost == "tied", {2: 5}),
    Rule("the tie is lost before anything is sharded", lambda s: s.tie_lost == "loaded", {26: 7}),
    Rule("the tie is lost when a checkpoint is loaded", lambda s: s.tie_lost == "resumed", {25: 10}),
    # where it starts, and what it resumes from
    Rule("a shard does not start from the given weights", lambda s: s.says("start") and not s.says("tie"), {24: 9}),
    Rule("ranks hold each other's shards, and compute with others", lambda s: s.start and s.says("logits"), {30: 10}),
    Rule("ranks hold each other's shards", lambda s: s.start, {30: 3}),
    Rule("it is wrong right after a checkpoint was loaded, and not before", _first_after, {25: 9}),
    Rule("a frozen weight moved", lambda s: "frozen" in s.evidence.get("update", ""), {20: 3, 25: 3, 11: 2}),
    # copies and collectives
    Rule("the optimizer does not hold each parameter once", lambda s: s.says("census") and not s.says("tie"), {20: 9}),
    Rule("ranks issue different collectives", lambda s: s.says("collectives") and not s.says("layout"), {27: 9}),
    Rule("… and gradients were not reduced", lambda s: s.says("collectives") and _own_data_only(s), {9: 9.5}),
    Rule("gradients agree, copies of weights do not", lambda s: s.drift == "weights" and not s.gradients, {22: 8}),
    Rule("… and one rank clips by itself", lambda s: s.drift == "weights" and s.case.clip > 0 and s.uneven, {19: 8.5}),
    Rule("… which are gathered from ZeRO's parts", lambda s: s.drift == "weights" and s.case.zero in (1, 2), {23: 8}),
    Rule("copies differ", lambda s: s.says("replicas"), {22: 2}),
    Rule("only the head's bias is wrong", lambda s: _only(s, "bias") or s.drift_of == (HEAD_BIAS,), {31: 6}),
    # precision
    Rule("values or master weights of a lower precision than asked", lambda s: s.says("precision"), {28: 8}),
    Rule("a rank multiplies in another precision than asked", lambda s: s.says("switches"), {28: 7}),
    Rule("the error looks like rounding to a lower precision", lambda s: s.rounding, {28: 7}),
    Rule("weights are rounded to a lower precision", _moves(LOW), {28: 9.5}),
    Rule("the norm alone is off, and only a little", _norm(NEAR), {28: 6}),
    # forward
    Rule("the error of the logits is the same for every token", lambda s: s.forward and s.forward.constant, {31: 9}),
    Rule("the logits are tp times too large", lambda s: s.forward and _power_of_tp(s.forward.factor, s.case), {7: 8}),
    Rule("the logits have a factor", lambda s: s.forward and s.forward.factor is not None, {5: 5}),
    Rule("columns of the logits stand in other places", lambda s: s.forward and s.forward.moved, {11: 7}),
    Rule("errors begin at tokens of one shard", _tokens_of_one_shard, {11: 7}),
    Rule("errors begin at the padding row's token", _padding_token, {12: 6}),
    Rule("the logits are wrong", lambda s: s.forward, {23: 2, 8: 1.5, 11: 1}),
    # loss
    Rule("the loss looks labels up on other shards than there are", _law(11), {11: 8}),
    Rule("the loss counts what must not count", _law(13), {13: 8}),
    Rule("the loss takes statistics of one shard", _law(14), {14: 8}),
    Rule("the loss takes its logits for what they are not", _law(15), {15: 8}),
    Rule("the softmax is shifted by each shard's own maximum", _law(16), {16: 8}),
    Rule("the loss loses the weights of the tokens", _law(17), {17: 8}),
    Rule("large logits, and the loss is wrong", lambda s: _wrong_loss(s) and s.case.logit_scale > 1, {16: 6}),
    Rule("the logits are right, the loss is no number", lambda s: _wrong_loss(s) and _no_number(s), {16: 5}),
    Rule("the loss is wrong, with a term beside the softmax", lambda s: _wrong_loss(s) and _extra_term(s), {14: 4}),
    Rule("the logits are right, the loss is not", _wrong_loss, {13: 2, 15: 1.9, 17: 1.5, 16: 1.2}),
    # uses of the tied weight
    Rule("a contribution to the tied gradient is missing", _missing("all"), {4: 6, 8: 3}),
    Rule("a contribution to the tied gradient is missing on some slices", _missing("some"), {8: 6, 4: 5}),
    Rule("one contribution to the tied gradient is scaled", _scaled_part, {5: 6}),
    Rule("one end of the model has a factor", lambda s: _ends(s) and s.factor is not None, {5: 4}),
    # data parallelism and accumulation
    Rule("a copy holds one data-parallel rank's data only", lambda s: _by_dp(s) and _own_data_only(s), {9: 6.5}),
    Rule("one contribution is reduced over data-parallel ranks, the other not", _one_part_by_dp, {10: 7.5, 9: 3}),
    Rule(
        "data-parallel ranks count by factors of their own",
        lambda s: _by_dp(s) and not _own_data_only(s),
        {10: 6, 9: 4},
    ),
    Rule("micro-batches do not count alike", lambda s: "micro" in s.varies, {21: 7}),
    Rule("micro-batches count by their number of tokens", _by_tokens, {17: 7.5}),
    Rule("every gradient is dp times off", lambda s: _everywhere(s, s.case.dp), {9: 6}),
    Rule(
        "every gradient is off by the number of micro-batches", lambda s: _everywhere(s, s.case.accumulate), {21: 6.5}
    ),
    Rule("every gradient is tp times off", lambda s: _everywhere(s, s.case.tp), {9: 5}),
    Rule("every gradient has one factor", lambda s: s.clean_forward and s.everything and s.factor, {17: 3, 10: 2}),
    Rule("slices of tensor-parallel ranks are averaged", lambda s: s.case.tp > 1 and _mixed(s, 1 / s.case.tp), {9: 6}),
    Rule("slices of tensor-parallel ranks are summed", lambda s: _mixed(s, 1.0), {7: 6}),
    # reductions over tensor-parallel ranks
    Rule("what is recomputed counts otherwise", _recomputed_factor, {29: 7}),
    Rule("gradients are wrong where something is recomputed", _recomputed, {29: 6.2}),
    Rule("gradients are tp times too large", _tp_times, {7: 6}),
    Rule("below the head each rank has its own shard's part only", _through_own_shard, {6: 6.5, 8: 5.5}),
    Rule("some ranks' shards have no gradient", _dead_on_some_ranks, {8: 6}),
    Rule("the head is right, gradients below it are not", _lost_below_head, {6: 3, 8: 2.5}),
    Rule("… without a pattern", lambda s: _below_head(s) and s.top_factor is None, {23: 2.9}),
    # rows
    Rule("only the padding row is wrong, or its number on another shard", lambda s: s.lie("padding row"), {12: 7}),
    Rule("only rows at the border of shards are wrong", lambda s: s.lie("border"), {11: 6}),
    Rule("only rows beyond the shortest shard are wrong", lambda s: s.lie("beyond the shortest"), {11: 6}),
    Rule("only rows of one shard are wrong", lambda s: s.lie("shard") and not s.lie("padding row"), {11: 2}),
    Rule("only rows that nothing touches are wrong", lambda s: s.lie("no token"), {23: 3}),
    # stale and strange
    Rule("the gradient holds that of the step before", lambda s: s.family("step before"), {23: 7}),
    Rule("every gradient is zero", lambda s: s.everything and _is(s.factor, 0.0), {23: 6.5}),
    Rule("a gradient is zero", lambda s: s.dead, {4: 4}),
    Rule("a gradient holds terms of another tensor", lambda s: s.family("other tensor"), {27: 7}),
    Rule("the head's gradient is wrong, loss and logits are not", _at_head, {17: 4}),
    Rule(
        "a gradient is explained by nothing",
        lambda s: s.clean_forward and not any(f.explained for f in s.fits),
        {23: 3},
    ),
    Rule("something is no number", _no_number, {23: 3, 16: 2}),
    Rule("the loss is right, and what comes back from it is not", _from_the_loss_on, {17: 7.2}),
    # norm
    Rule("the norm counts something twice or not at all", _norm("counts", "leaves"), {18: 7}),
    Rule("the norm is each rank's own", _own_norm, {19: 8}),
    Rule("the norm grows where gradients are tiny", lambda s: _norm_alone(s) and s.tiny, {19: 5}),
    Rule("gradients are right, the norm is not", _norm_alone, {18: 4, 19: 3}),
    # update
    Rule("a part of a weight moves otherwise than asked", _part_of_a_weight, {11: 6}),
    Rule("a part of a weight does not move", lambda s: _part_of_a_weight(s) and _moves(STILL)(s), {11: 7}),
    Rule("a weight does not move", _moves(STILL), {25: 5, 11: 3}),
    Rule("no weight moves in a step", lambda s: _all_move(s, STILL), {23: 6.5}),
    Rule("weights move as the step before asked", _moves(LATE), {23: 7, 11: 5}),
    Rule("weights move as if the optimizer's state were new", _moves(FRESH, COUNT), {25: 8}),
    Rule("weights decay otherwise than asked", _moves(DECAY), {20: 7}),
    Rule(
        "weights move by another amount, with clipping", lambda s: _moves(RATE)(s) and s.case.clip > 0, {19: 6, 18: 4}
    ),
    Rule("weights are clipped by another norm than the right one", lambda s: s.updates and s.norms, {18: 7}),
    Rule("weights move by another amount", _moves(RATE), {25: 5, 20: 2}),
    Rule("gradients are right, updates are not", lambda s: s.updates, {20: 2}),
    Rule("… and the optimizer keeps moments", lambda s: s.updates and s.case.optimizer != "sgd", {25: 3}),
)


def _ends(s: Symptoms) -> bool:
    return s.clean_forward and s.kinds in ({"embedding"}, {"head"})


def _extra_term(s: Symptoms) -> bool:
    return s.case.loss in ("smoothed", "z_loss")


def guesses(found: Symptoms) -> tuple[Guess, ...]:
    """Classes that the rules speak for, best first."""
    votes: dict[int, list[tuple[float, str]]] = {}
    for rule in RULES:
        if _holds(rule, found):
            for bug_class, weight in rule.classes.items():
                votes.setdefault(bug_class, []).append((weight, rule.why.removeprefix("… and ").removeprefix("… ")))
    ranked = []
    for bug_class, spoken in votes.items():
        weight, why = max(spoken, key=lambda vote: vote[0])
        total = weight + 0.1 * (sum(vote[0] for vote in spoken) - weight)
        ranked.append(Guess(bug_class, NAMES[bug_class], round(total, 2), why))
    return tuple(sorted(ranked, key=lambda guess: (-guess.weight, guess.bug_class)))


def _holds(rule: Rule, found: Symptoms) -> bool:
    try:
        return bool(rule.when(found))
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False  # a symptom that could not be measured speaks for nothing
