"""What is known to be wrong in frameworks: a table of entries, see `suites.expectations`.

Each was seen twice in fresh processes. To add one: a row here, with a minimal case in one of the plans
(`tiebench known` checks it), what that case gives and should give, and the lines of the framework that cause it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.cases import Case
from suites.expectations import Entry
from suites.refusals import REFUSALS

FOUND = "found by this suite"
SINCE = "2026-12-01"


def _refused_too_late(*names: str) -> Callable[[Case], bool]:
    """What these refusals are about, but for the order in which the model registers its modules."""

    def late(case: Case) -> bool:
        if case.register == "head_first":
            return False
        other = case.but(register="head_first")
        return any(entry.concerns(other) for entry in REFUSALS if entry.name in names)

    return late


def _issue(name: str, versions: str, *, when: Callable[[Case], bool], cases: dict[str, Any], **more: Any) -> Entry:
    given = {"path": "deepspeed", "link": FOUND, "since": SINCE, "verdicts": ("bug",), **more}
    return Entry(name=name, versions=versions, when=when, cases=cases, **given)


KNOWN_ISSUES: tuple[Entry, ...] = (
    _issue(
        "zero-3-not-validated",
        ">=0.18.6,<0.19.4",
        when=lambda case: case.tp > 1,
        cases={"zero": 3},
        verdicts=("crash",),
        message="compatibility between 'autotp' and 'zero_stage = 3' has not been validated",
        why="tensor parallelism with ZeRO 3 fails on a bare assertion",
        minimal="deepspeed:head=row,zero=3",
        observed="AssertionError as the engine is built",
        right="a refusal that names both settings, or training; 0.19.4 trains",
        reasoning="_configure_tensor_parallel_states (runtime/engine.py) asserts the stage instead of raising an error",
    ),
    _issue(
        "gathered-head-not-gathered",
        ">=0.18.6,<0.19.4",
        when=lambda case: case.tp > 1,
        cases={"head": "gathered"},
        verdicts=("crash",),
        message="Expected input batch_size|index out of range|is invalid for input of size",
        why="gather_output of a column-parallel head is not looked at",
        minimal="deepspeed:tie=untied,head=gathered",
        observed="each rank gets its own part of the logits, and the loss fails; tied, the embedding has a part of the "
        "rows and the lookup fails",
        right="whole logits on every rank; 0.19.4 gives them for even shards, 0.19.6 for all",
        reasoning="LinearLayer (module_inject/layers.py) cuts the weight, a shared one too, and knows no gather_output",
    ),
    _issue(
        "split-views-updated-in-place",
        ">=0.18.7,<0.19.0",
        when=lambda case: case.dp > 1,
        cases={"zero": (1, 2)},
        verdicts=("crash",),
        message="Output 0 of Split is a view and is being modified inplace",
        why="ZeRO 1 and 2 over several data-parallel ranks fail in the second step under torch 2.13",
        minimal="deepspeed:tie=untied,head=row,zero=2,tp=1,dp=2",
        observed="RuntimeError: Output 0 of Split is a view and is being modified inplace",
        right="training, as with later versions",
        reasoning="parameters are flattened on their device without detach() (runtime/zero/stage_1_and_2.py, in 0.19.0 "
        "with it): autograd tracks the flat buffer, and the update writes into views of it; the same without tiebench",
    ),
    _issue(
        "row-head-tie-broken",
        "<0.19.6",
        when=lambda case: case.tp > 1,
        cases={"tie": "tied", "head": "row"},
        oracles=("tie",),
        why="the tie of a row-parallel head is broken without a word",
        link="https://github.com/deepspeedai/DeepSpeed/pull/8538",
        minimal="deepspeed:head=row",
        observed="after sharding, embedding and head are two tensors; the gradient of norm.weight is off by 0.7 of "
        "itself",
        right="one tensor, sharded over hidden, and the reference's gradient; 0.19.8 has both",
        reasoning="AutoTP puts a layer with a copy of the shard in the head's place and leaves the embedding whole "
        "(module_inject/auto_tp.py); the layer was made for inference and has no backward for its input",
    ),
    _issue(
        "row-head-wrong",
        "<0.19.6",
        when=lambda case: case.tp > 1,
        cases={"tie": "untied", "head": "row"},
        why="below a row-parallel head every rank gets its own part of the gradient only",
        link="https://github.com/deepspeedai/DeepSpeed/pull/8538",
        minimal="deepspeed:tie=untied,head=row",
        observed="norm.weight's gradient is off by 0.5 of itself, and replicas drift from step 1 on",
        right="the gradient of the input summed over the tensor-parallel ranks; 0.19.8 does it",
        reasoning="LmHeadLinearAllreduce (module_inject/layers.py) cuts the replicated input by hand and reduces the "
        "output, "
        "outside autograd",
    ),
    _issue(
        "gathered-head-wrong",
        ">=0.19.4,<0.19.6",
        when=lambda case: case.tp > 1 and case.vocab % case.tp != 0,
        cases={"tie": "untied", "head": "gathered"},
        why="a column-parallel head with gather_output and uneven shards is sharded over hidden instead",
        minimal="deepspeed:tie=untied,head=gathered,hidden=35,vocab=67",
        observed="0.19.5 shards over hidden",
        right="a head sharded over the vocabulary with gathered logits; 0.19.6 has it",
        reasoning="for uneven shards _create_column_parallel_layer (module_inject/auto_tp.py) falls back to "
        "LmHeadLinearAllreduce, the layer of row-head-wrong",
    ),
    _issue(
        "accumulation-counted-twice",
        ">=0.18.6,<0.19.6",
        when=lambda case: case.accumulate > 1,
        cases={},
        oracles=("gradient",),
        why="gradients are divided by the number of micro-batches twice where the model returns more than the loss",
        minimal="deepspeed:head=unmatched,accumulate=2",
        observed="every gradient is half of what it should be",
        right="the mean over micro-batches; 0.19.6 gives it",
        reasoning="_backward_prologue_per_tensor (runtime/engine.py) divides the gradient at every output of the "
        "model: once at the loss, and again where it passes the logits on its way down",
    ),
    _issue(
        "refused-too-late",
        ">=0.19.8",
        when=_refused_too_late(
            "hidden-embedding-options",
            "vocab-embedding-options",
            "embedding-forward",
            "tied-to-no-embedding",
            "vocabulary-too-small",
        ),
        cases={},
        verdicts=("refused",),
        oracles=("refusal",),
        why="a head or tie that cannot be sharded is refused after the layers before it were replaced",
        minimal="deepspeed:head=row,embedding_option=max_norm",
        observed="NotImplementedError, and layers.0.q_proj and 13 more modules of the user's model are sharded already",
        right="the same error before the model is changed, as when the head is registered first",
        reasoning="_create_row_parallel_layer and _create_vocab_parallel_layer (module_inject/auto_tp.py) validate "
        "when the "
        "walk of _replace_module reaches the head; ties are recorded before it, and could be validated there",
    ),
    _issue(
        "row-head-refused-too-late",
        ">=0.19.6,<0.19.8",
        when=lambda case: case.tp > 1 and (case.register == "embedding_first" or case.embedding_spec != "none"),
        cases={"head": "row"},
        verdicts=("refused",),
        oracles=("refusal",),
        why="row-parallel heads are refused after the layers before them were replaced",
        minimal="deepspeed:head=row",
        observed="NotImplementedError, and all layers before the head are sharded already",
        right="the same error before the model is changed",
        reasoning="raised when the walk of _replace_module reaches the head (module_inject/auto_tp.py)",
    ),
    _issue(
        "bf16-sums-without-zero",
        ">=0.18.9",
        when=lambda case: case.tp > 1,
        cases={"dtype": "bfloat16", "zero": 0, "head": ("vocab", "row")},
        verdicts=("bug: precision",),
        oracles=("precision",),
        why="without ZeRO, gradients are summed in bf16, and the norm that clips holds one tensor-parallel "
        "rank's shards",
        minimal="deepspeed:head=row,dtype=bfloat16",
        observed="gradients in bf16, global norm off by 0.3 of itself",
        right="sums in fp32, as with ZeRO 1 to 3, and the norm over all shards",
        reasoning="FP16_UnfusedOptimizer and FP16_Optimizer keep the model's own gradients; their norm is taken "
        "without the "
        "model-parallel group that AutoTP makes",
    ),
    _issue(
        "embedding-sharded-alone",
        ">=0.18.9",
        when=lambda case: case.tp > 1 and case.embedding_spec != "none",
        cases={"tie": "tied", "head": "unmatched"},
        oracles=("tie",),
        why="an entry for a tied embedding alone cuts it over hidden and breaks the tie without a word",
        minimal="deepspeed:head=unmatched,embedding_spec=before_head,embedding_cut=row",
        observed="after sharding, embedding and head are two tensors; the first forward fails with shapes 16 and 32",
        right="a refusal, or the head sharded with the embedding, as for row-parallel heads",
        reasoning="_slice_embedding (module_inject/auto_tp.py) makes a new nn.Embedding of the rank's columns; its tie "
        "is looked "
        "for only where the head has a row entry (_find_tied_row_parallel_embedding_ids)",
    ),
    _issue(
        "zero-init-dtype-ignored",
        ">=0.18.9",
        when=lambda case: case.dtype == "float32",
        cases={"init": "zero_dtype"},
        oracles=("layout", "start"),
        why="deepspeed.zero.Init(dtype=torch.float32) makes bf16 weights where the device has no fp16",
        minimal="deepspeed:head=row,zero=3,init=zero_dtype",
        observed="all weights are bfloat16 from the start, and so is the training",
        right="float32, as asked, and as it is when the precision comes from the configuration",
        reasoning="InsertPostInitMethodToModuleSubClasses._set_dtype (runtime/zero/partition_parameters.py): in `dtype "
        "or "
        "torch.float16 if fp16_supported() else torch.bfloat16 if …` the condition binds over `dtype or "
        "torch.float16`, "
        "so dtype is used only where fp16 is supported; is_bf16_supported is not called either",
    ),
    _issue(
        "zero-init-gather-order",
        ">=0.19.8",
        when=lambda case: case.tp > 1 and case.dp > 1 and case.accumulate > 1,
        cases={"init": "zero", "zero": 3},
        oracles=("collectives",),
        always=False,
        why="AutoTP under deepspeed.zero.Init: ranks gather over all ranks and over data-parallel ones in "
        "different orders",
        minimal="deepspeed:head=row,zero=3,dp=2,accumulate=2,init=zero",
        observed="collective 81 is an all-gather of two ranks on one rank and of four on another; a backend that runs "
        "them "
        "in order would wait for ever",
        right="one order on all ranks",
        reasoning="prefetching collects parameters in a set (params_to_prefetch, "
        "runtime/zero/partitioned_param_coordinator.py), "
        "whose order is that of addresses; all_gather_coalesced (partition_parameters.py) sorts within a "
        "process group, "
        "but takes the groups in the order of that set",
    ),
    _issue(
        "universal-alias-is-a-shard",
        ">=0.19.8",
        when=lambda case: case.tp > 1 and case.zero in (1, 2),
        cases={"resume": "universal", "tie": "tied", "head": ("row", "vocab")},
        oracles=("checkpoint",),
        only=True,
        message=r"1 of \d+ files of the universal checkpoint: fp32 of (lm_head|embed_tokens)\.weight has",
        why="a universal checkpoint holds one rank's shard under the second name of a tied weight",
        minimal="deepspeed:head=row,zero=1,optimizer=adamw,resume=universal",
        observed="zero/lm_head.weight/fp32.pt has [64, 16], zero/embed_tokens.weight/fp32.pt the whole [64, 32]",
        right="the whole weight under both names, or one name only",
        reasoning="ds_to_universal.main fills in names that ZeRO's files lack from the first mp_rank file's module "
        "state, "
        "which holds a tensor-parallel shard, and skips names that are there by then",
    ),
    _issue(
        "universal-frozen",
        ">=0.19.8",
        when=lambda case: case.tp > 1 and case.frozen != "none",
        cases={"resume": "universal"},
        verdicts=("crash",),
        message="AssertionError in .*Unused patterns=",
        why="a checkpoint with frozen parameters cannot be made universal",
        minimal="deepspeed:tie=untied,head=row,zero=1,optimizer=adam,frozen=embedding,resume=universal",
        observed="AssertionError: Unused patterns=['^embed_tokens\\.weight$'] while merging tp slices",
        right="a file for every parameter, frozen ones too",
        reasoning="ZeRO's files have no frozen parameters, AutoTP's patterns name them, and strict mode of "
        "ds_to_universal "
        "asserts that each pattern is used; without it the first rank's shard would be taken for the whole",
    ),
    _issue(
        "universal-adam-only",
        ">=0.19.8",
        when=lambda case: case.optimizer in ("sgd", "momentum"),
        cases={"resume": "universal"},
        verdicts=("crash",),
        message="KeyError in .*'exp_avg'",
        why="only Adam's checkpoints can be made universal; others fail on a missing key",
        minimal="deepspeed:tie=untied,head=row,zero=1,resume=universal",
        observed="KeyError: 'exp_avg'",
        right="a clear refusal, or files of the moments that there are",
        reasoning="extract_zero_shards reads exp_avg and exp_avg_sq of every optimizer (checkpoint/ds_to_universal.py)",
    ),
    _issue(
        "universal-zero-init",
        ">=0.19.8",
        when=lambda case: case.tp > 1 and case.dp > 1,
        cases={"resume": "universal", "init": "zero"},
        verdicts=("crash",),
        message="RuntimeError in .*exceeds dimension size",
        why="a checkpoint of AutoTP under deepspeed.zero.Init cannot be made universal",
        minimal="deepspeed:head=row,zero=3,dp=2,optimizer=adamw,resume=universal,init=zero",
        observed="RuntimeError: start (32) + length (16) exceeds dimension size (40)",
        right="the whole weights",
        reasoning="parameters that AutoTP leaves whole stay cut over all ranks, while the converter takes every "
        "parameter for "
        "cut over the data-parallel ranks of one tensor-parallel rank (dump_param_fragment, "
        "checkpoint/ds_to_universal.py)",
    ),
)
