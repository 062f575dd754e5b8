"""Which sharding a case must run: the expectation that live shapes are held against (rule 2 of the design).

Dimensions: 0 is the output (the vocabulary for embedding and head), 1 the input (the hidden dimension), None is
"whole on every tensor-parallel rank".
"""

from __future__ import annotations

from suites.cases import Case
from suites.model import COLUMN, EMBEDDING, HEAD, HEAD_BIAS, ROW, parameter_shapes

HEAD_DIM_OF = {"vocab": 0, "gathered": 0, "row": 1, "unmatched": None}
GATHERED_TIE_NOTE = (
    "AutoTP keeps a tied gathered head whole on every rank (documented upstream): this case tests no sharded head"
)


def expected_layout(case: Case) -> dict[str, int | None]:
    """Sharded dimension of every parameter by canonical name."""
    layout: dict[str, int | None] = {}
    for name in parameter_shapes(case):
        module = name.split(".")[-2]
        layout[name] = 0 if module in COLUMN else 1 if module in ROW else None
    head = HEAD_DIM_OF[case.head]
    if case.path == "deepspeed" and case.tied and case.head == "gathered":
        layout[EMBEDDING] = layout[HEAD] = None
    else:
        layout[HEAD] = head
        layout[EMBEDDING] = head if case.tied or case.path == "handwritten" else None
    if HEAD_BIAS in layout:
        layout[HEAD_BIAS] = 0 if layout[HEAD] == 0 else None
    return dict.fromkeys(layout) if case.tp == 1 else layout


def expected_logits_dim(case: Case) -> int | None:
    """Sharded dimension of the logits [batch, sequence, vocabulary]."""
    return 2 if case.head == "vocab" and case.tp > 1 else None


def reports_norm(case: Case) -> bool:
    """Whether the path reports a gradient norm: DeepSpeed has none without ZeRO in fp32."""
    return not (case.path == "deepspeed" and case.zero == 0)


def layout_note(case: Case) -> str:
    """What people must know of a case whose layout is not what its name suggests; empty for most."""
    if case.path == "deepspeed" and case.tied and case.head == "gathered" and case.tp > 1:
        return GATHERED_TIE_NOTE
    return ""
