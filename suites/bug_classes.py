"""The classes of public bugs, by the numbers of suites/README.md, from about 100 public reports."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[int, str] = {
    1: "alias lost when materialised, wrapped or loaded",
    2: "alias lost by replacement order",
    3: "tie detector blind, or sees ties that are none",
    4: "one contribution missing from the tied gradient",
    5: "one contribution scaled",
    6: "input gradient below the head not reduced",
    7: "reduced twice",
    8: "reduction outside autograd or on a dropped copy",
    9: "data-parallel reduce missing, wrong group or divisor",
    10: "reductions in the wrong order",
    11: "uneven rows mixed, frozen or stale",
    12: "padding_idx mapped wrongly on a shard",
    13: "rows that must not count do count",
    14: "local statistics in the loss",
    15: "gathered logits taken for sharded ones, or the reverse",
    16: "softmax maximum of one shard only",
    17: "backward assumes a uniform upstream gradient",
    18: "gradient norm counts a weight twice or misses a shard",
    19: "norm local to a rank",
    20: "optimizer holds the tied weight twice, or decays it wrongly",
    21: "accumulation overwrites or counts twice",
    22: "replicas drift",
    23: "races, stale memory",
    24: "sharded initialisation wrong",
    25: "state lost over a checkpoint or a step",
    26: "resize or cast breaks the tie",
    27: "ranks issue different collectives",
    28: "precision lost",
    29: "recompute reduces twice",
    30: "another program ran, or a result went missing",
    31: "bias added on every rank",
}
