"""Training data that reaches every shard (rule 7 of the design).

Every micro-batch has, among its tokens and among its labels, the first and last row of each vocabulary shard (in two
common ways to cut an uneven vocabulary) and the padding row; labels are ignored in a number that differs between
data-parallel ranks and micro-batches (unless the factor `ignored` says otherwise); no two ranks, micro-batches or
steps share their data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from suites.cases import Case

IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and labels, both int64 [batch, sequence]; labels are the next tokens already, `IGNORED` ones do not
    count."""

    tokens: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same data on another device."""
        return MicroBatch(self.tokens.to(device), self.labels.to(device))


def edge_rows(case: Case) -> list[int]:
    """First and last vocabulary row of each tensor-parallel shard, and the padding row.

    An uneven vocabulary is cut with the longer shards first (torch.tensor_split, DeepSpeed) or in ceil-sized chunks
    (torch.chunk, DTensor); the rows of both are in.
    """
    rows = {0, case.vocab - 1}
    base, longer = divmod(case.vocab, case.tp)
    ceiling = -(-case.vocab // case.tp)
    start = 0
    for rank in range(case.tp):
        start += base + (rank < longer)
        rows |= {start - 1, min(start, case.vocab - 1)}
        edge = min(ceiling * (rank + 1), case.vocab)
        rows |= {edge - 1, min(edge, case.vocab - 1)}
    if case.padding_idx is not None:
        rows.add(case.padding_idx)
    return sorted(rows)


def micro_batch(case: Case, step: int, micro: int, dp_rank: int) -> MicroBatch:
    """The data of one micro-batch of one data-parallel rank; the same on all of its tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(_seed(case.seed, step, micro, dp_rank))
    count = case.batch * case.sequence
    edges = torch.tensor(edge_rows(case))

    def drawn() -> Tensor:
        values = torch.randint(0, case.vocab, (count,), generator=generator)
        places = torch.randperm(count, generator=generator)[: len(edges)]
        values[places] = edges[: len(places)]
        return values

    tokens, labels = drawn(), drawn()
    ignored = 1 + (2 * dp_rank + micro + step) % max(1, min(5, count // 4))
    free = (~torch.isin(labels, edges)).nonzero().flatten()
    if case.ignored == "unequal":
        labels[free[torch.randperm(len(free), generator=generator)[:ignored]]] = IGNORED
    elif case.ignored == "rank" and dp_rank == case.dp - 1:
        labels[:] = IGNORED
    shape = (case.batch, case.sequence)
    return MicroBatch(tokens.reshape(shape), labels.reshape(shape))


def token_weights(labels: Tensor) -> Tensor:
    """Weight of each token in ``loss=weighted``, fp32 [n] for labels [n]: 0.25 to 2, different from token to token.

    Multiples of a quarter, so that every precision holds them exactly.
    """
    place = torch.arange(labels.numel(), device=labels.device)
    return (1 + (3 * place + 5 * labels.flatten()) % 8).float() / 4


def _seed(*parts: int) -> int:
    seed = 17
    for part in parts:
        seed = (seed * 1_000_003 + part) % (2**62)
    return seed
