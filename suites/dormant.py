"""Dormant classes: which bugs a case could not have shown, whatever the program under test did.

A case without data parallelism says nothing about data-parallel reductions, one without clipping nothing about
clipping by a wrong norm. A green verdict must say so. A class is dormant as a whole, or in part: then some of its bugs
would show and others, which are named, would not. Nothing is listed that the oracles see all the same: Adam hides a
constant factor of the gradient from the weights, and the gradient's own oracle sees it.

The table is held against the faults: a fault in a case where its class is dormant as a whole changes nothing at all
(`suites/tests/test_dormant.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from suites import layouts
from suites.bug_classes import NAMES
from suites.cases import Case
from suites.layouts import HEAD_DIM_OF
from suites.precision import LOW


@dataclass(frozen=True)
class Dormant:
    """A class of bugs that a case cannot show.

    Args:
        bug_class: number in suites/README.md; name: short.
        reason: why; begins with "in part" where other bugs of the class would show.
        whole: no bug of the class could show.
    """

    bug_class: int
    name: str
    reason: str
    whole: bool


@dataclass(frozen=True)
class Row:
    """One row of the table: what must be so in the case, which classes sleep then, and why."""

    when: Callable[[Case], bool]
    reason: str
    whole: tuple[int, ...] = ()
    part: tuple[int, ...] = ()


def _norm_unseen(case: Case) -> bool:
    return not layouts.reports_norm(case) and case.clip == 0


def _even(case: Case) -> bool:
    dim = HEAD_DIM_OF[case.head]
    return dim is None or (case.vocab if dim == 0 else case.hidden) % case.tp == 0


def _keeps_nothing(case: Case) -> bool:
    return case.optimizer == "sgd"


TABLE: tuple[Row, ...] = (
    Row(lambda c: not c.tied, "the model is untied", (1, 2, 26)),
    Row(lambda c: not c.tied, "no weight has two contributions", part=(4, 5, 18)),
    Row(lambda c: not c.tied and c.optimizer != "adamw", "untied, and nothing decays", (20,)),
    Row(lambda c: c.tied, "a detector that takes everything for tied", part=(3,)),
    Row(lambda c: c.tied and c.register == "embedding_first", "the head registered first", part=(2,)),
    Row(lambda c: c.tied and c.frozen == "embedding", "the tied weight is frozen", (4, 5)),
    Row(lambda c: c.tp == 1, "nothing is sharded (tp = 1)", (6, 7, 8, 15, 24)),
    Row(lambda c: c.tp == 1 and (c.dp == 1 or c.zero == 0), "no weight is cut into parts", (11,)),
    Row(lambda c: c.tp == 1 and c.dp > 1 and c.zero > 0, "rows of shards (only ZeRO's parts are there)", part=(11,)),
    Row(lambda c: c.tp > 1 and c.activation == "contiguous", "copies of strided activations", part=(8,)),
    Row(lambda c: c.tp > 1 and _even(c), "borders of uneven shards (these are even)", part=(11,)),
    Row(lambda c: c.tp == 1 or c.vocab % c.tp == 0, "padding of uneven vocabulary shards", part=(13,)),
    Row(lambda c: c.tp == 1 and c.loss in ("mean", "weighted"), "no statistics over shards are taken", (14,)),
    Row(lambda c: c.tp > 1 and c.loss in ("mean", "weighted"), "smoothed labels and z-loss", part=(14,)),
    Row(
        lambda c: c.tp == 1 and c.logit_scale <= 1 and c.loss == "mean",
        "one shard has the only maximum, and logits are small",
        (16,),
    ),
    Row(lambda c: c.tp > 1 and c.logit_scale <= 1, "overflow of large logits", part=(16,)),
    Row(lambda c: c.loss != "weighted", "tokens of different weight", part=(17,)),
    Row(lambda c: c.accumulate == 1 and c.dp == 1, "means over unequal numbers of tokens", part=(17,)),
    Row(lambda c: c.world_size == 1, "there is one rank", (9, 19, 22, 27)),
    Row(lambda c: c.dp == 1 and c.tp > 1, "reductions over data-parallel ranks (dp = 1)", part=(9, 22, 27, 28)),
    Row(lambda c: c.dp == 1 and c.clip == 0, "dp = 1, and nothing is clipped", (10,)),
    Row(lambda c: c.dp == 1 and c.clip > 0, "reductions over data-parallel ranks (dp = 1)", part=(10,)),
    Row(lambda c: c.padding_idx is None, "there is no padding row", (12,)),
    Row(_norm_unseen, "the path reports no norm, and nothing is clipped", (18, 19)),
    Row(
        lambda c: c.clip == 0 and c.world_size > 1 and not _norm_unseen(c),
        "clipping by a wrong coefficient",
        part=(19,),
    ),
    Row(lambda c: c.tied and c.optimizer != "adamw", "decay applied twice (nothing decays)", part=(20,)),
    Row(lambda c: c.accumulate == 1, "a step has one micro-batch", (21,)),
    Row(lambda c: c.zero == 0 or c.dp == 1, "parts of the weights that are published late", part=(23,)),
    Row(
        lambda c: c.resume == "none" and _keeps_nothing(c), "the optimizer keeps nothing, and nothing is resumed", (25,)
    ),
    Row(lambda c: c.resume == "none" and not _keeps_nothing(c), "state lost over a checkpoint", part=(25,)),
    Row(lambda c: c.resume != "none" and _keeps_nothing(c), "lost moments (the optimizer has none)", part=(25,)),
    Row(lambda c: c.dtype not in LOW, "missing fp32 master weights", part=(28,)),
    Row(lambda c: c.recompute == "none", "nothing is recomputed", (29,)),
    Row(lambda c: c.world_size == 1, "ranks whose observations are swapped", part=(30,)),
    Row(lambda c: c.head_bias == "no" or c.tp == 1, "no bias is added over shards", (31,)),
)


def dormant(case: Case) -> tuple[Dormant, ...]:
    """Classes that the case could not have shown, by number; those that sleep as a whole first."""
    found = [_of(row, number, whole=True) for row in TABLE if row.when(case) for number in row.whole]
    asleep = {entry.bug_class for entry in found}
    for row in TABLE:
        if row.when(case):
            found += [_of(row, number, whole=False) for number in row.part if number not in asleep]
    return tuple(sorted(found, key=lambda entry: (not entry.whole, entry.bug_class)))


def _of(row: Row, number: int, *, whole: bool) -> Dormant:
    return Dormant(number, NAMES[number], row.reason if whole else f"in part: {row.reason}", whole)
