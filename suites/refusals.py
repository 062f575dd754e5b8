"""What frameworks refuse on purpose: a table of entries, see `suites.expectations`.

A case that an entry is about must be refused with this message, on every rank and before the model was changed. A
refusal that comes later is a known issue, or a new finding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.cases import Case
from suites.expectations import Entry


def head_first(case: Case) -> bool:
    """AutoTP meets the head before any other layer: what it refuses of the head, it refuses before it has changed
    anything."""
    return case.tp > 1 and case.register == "head_first"


def _refusal(
    name: str, versions: str, *, message: str, why: str, minimal: str, when: Callable[[Case], bool], **cases: Any
) -> Entry:
    return Entry(
        name=name,
        path="deepspeed",
        versions=versions,
        cases=cases,
        when=when,
        verdicts=("refused",),
        message=message,
        why=why,
        link="",
        since="2026-12-01",
        minimal=minimal,
        kind="refusal",
    )


REFUSALS: tuple[Entry, ...] = (
    _refusal(
        "partition-config-unknown",
        "<0.18.6",
        message=r"partition_config\s+Extra inputs are not permitted",
        why="the configuration of sharding by name, partition_config, came with 0.18.6",
        minimal="deepspeed:head=row",
        when=lambda case: case.tp > 1,
    ),
    _refusal(
        "vocab-option-unknown",
        "<0.19.8",
        message=r"vocab_parallel_lm_head\s+Extra inputs are not permitted",
        why="the option vocab_parallel_lm_head came with 0.19.8",
        minimal="deepspeed:head=vocab",
        when=lambda case: case.tp > 1,
        head="vocab",
    ),
    _refusal(
        "row-head-not-supported",
        ">=0.19.6,<0.19.8",
        message="Training with explicit row-parallel output heads is not supported",
        why="row-parallel heads cannot be trained from 0.19.6 to 0.19.7",
        minimal="deepspeed:head=row,register=head_first",
        when=lambda case: head_first(case) and case.embedding_spec == "none",
        head="row",
    ),
    _refusal(
        "fp16-on-cpu",
        "",
        message="(?i)fp16|half|float16",
        why="DeepSpeed has no fp16 on CPU",
        minimal="deepspeed:dtype=float16",
        when=lambda case: True,
        dtype="float16",
    ),
    _refusal(
        "hidden-embedding-options",
        ">=0.19.8",
        message="Hidden-parallel embedding options max_norm and sparse are not supported",
        why="an embedding that shares a row-parallel head's shard has neither max_norm nor sparse gradients",
        minimal="deepspeed:head=row,register=head_first,embedding_option=max_norm",
        when=head_first,
        tie="tied",
        head="row",
        embedding_option=("max_norm", "sparse"),
    ),
    _refusal(
        "vocab-embedding-options",
        ">=0.19.8",
        message="Vocabulary-parallel embedding options max_norm, scale_grad_by_freq, and sparse are not supported",
        why="an embedding that shares a vocabulary-parallel head's shard has no such options",
        minimal="deepspeed:head=vocab,register=head_first,embedding_option=max_norm",
        when=head_first,
        tie="tied",
        head="vocab",
        embedding_option=("max_norm", "sparse", "scale_grad_by_freq"),
    ),
    _refusal(
        "embedding-forward",
        ">=0.19.8",
        message="sharding does not support the custom embedding forward of ScaledEmbedding",
        why="a tied embedding is sharded only if its forward is torch's, or Gemma3's in transformers",
        minimal="deepspeed:head=row,register=head_first,embedding_class=scaled,embedding_scale=6",
        when=head_first,
        tie="tied",
        head=("row", "vocab"),
        embedding_class="scaled",
    ),
    _refusal(
        "tied-to-no-embedding",
        ">=0.19.8",
        message="can only share its weight with nn.Embedding modules",
        why="a row-parallel head shares its weight with embeddings only",
        minimal="deepspeed:head=row,register=head_first,also_tied=linear",
        when=head_first,
        tie="tied",
        head="row",
        also_tied="linear",
    ),
    _refusal(
        "vocabulary-too-small",
        ">=0.19.8",
        message="requires nonempty vocabulary shards|requires a vocabulary of at least tp_size",
        why="a vocabulary-parallel head needs a row on every rank",
        minimal="deepspeed:head=vocab,register=head_first,vocab=3,tp=4",
        when=lambda case: head_first(case) and case.vocab < case.tp,
        head="vocab",
    ),
)
