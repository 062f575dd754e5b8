"""Path `deepspeed`: the case's model in DeepSpeed's own engine, AutoTP over tensor-parallel and ZeRO over data-parallel
ranks.

Everything that the case asks for goes through `deepspeed.initialize`; nothing of the training is done here. What this
module adds is the reading: parameters, gradients and weights are taken off the live engine, each rank's own part only,
so that `suites.observe` assembles them without the framework's gather.

Runs with DeepSpeed 0.18.9 to 0.19.8. Errors that DeepSpeed raises pass through unchanged: whether they are clear
refusals is for others to judge.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suites import optimizers
from suites.cases import Case
from suites.data import MicroBatch
from suites.lifecycle import CHANGED
from suites.model import COLUMN, ROW, Decoder, build_model, parameter_shapes
from suites.observe import Piece
from suites.paths import Notice
from suites.paths import deepspeed_checkpoint as checkpoints
from suites.paths.deepspeed_pieces import gradient_piece, low_gradient_piece, master_piece, weight_piece
from suites.precision import LOSS_SCALE, LOW

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import deepspeed
import deepspeed.comm.comm
import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

# What DeepSpeed remembers of its process groups; a second engine in the process would silently reuse another case's.
REMEMBERED_GROUPS = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
)
REMEMBERED_VALUES = (
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "mesh_device",
    "mpu",
)


def build(case: Case, device: torch.device, notice: Notice) -> DeepSpeedTrainer:
    """The case's model in a DeepSpeed engine; the default process group must be up.

    Raises:
        RuntimeError: DeepSpeed was imported for another kind of device.
        Exception: whatever DeepSpeed refuses the case with.
    """
    _prepare(device)
    return DeepSpeedTrainer(case, start_engine(case, device, notice), device, notice)


def start_engine(case: Case, device: torch.device, notice: Notice, more: Mapping[str, Any] | None = None) -> Any:
    """Model and engine; `more` is configuration that only this engine gets.

    Raises:
        Exception: whatever DeepSpeed refuses the case with; what it had changed of the model by then goes with it.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some versions print diagnostics
            model = _unsharded(case, device, notice)
            before = _parts(model)
            try:
                config = {**configuration(case), **(more or {})}
                engine, *_ = deepspeed.initialize(model=model, config=config, **_optimizing(case, model))
            except Exception as error:
                setattr(error, CHANGED, _changes(before, _parts(model)))
                raise
        _install_loss(engine.module)
    except BaseException:
        _forget()
        raise
    _notice(notice, "sharded", engine.module)
    return engine


def _parts(model: nn.Module) -> dict[str, tuple[object, str]]:
    """Every module and parameter of a model by name: itself, and what it is in words."""
    modules = {name: (module, type(module).__name__) for name, module in model.named_modules() if name}
    weights = model.named_parameters(remove_duplicate=False)
    return {**modules, **{name: (weight, str(tuple(weight.shape))) for name, weight in weights}}


def _changes(before: Mapping[str, tuple[object, str]], after: Mapping[str, tuple[object, str]]) -> tuple[str, ...]:
    """Parts that are not what they were, each with what it was and what it is."""
    found = []
    for name, (part, told) in before.items():
        now, telling = after.get(name, (None, "gone"))
        if now is not part or telling != told:
            found.append(f"{name} ({told} -> {telling if telling != told else 'another'})")
    return tuple(found)


def _unsharded(case: Case, device: torch.device, notice: Notice) -> Decoder:
    """The model that DeepSpeed is given: whole, or with ``init=zero`` in ZeRO's partitions already."""
    dtype = getattr(torch, case.dtype)
    told = lambda event, model: _notice(notice, event, model)  # noqa: E731
    if not case.init.startswith("zero"):
        return build_model(case, device, dtype, told)
    given = {"dtype": dtype} if case.init == "zero_dtype" else {}
    return build_model(
        case,
        device,
        dtype,
        told,
        partitioned=lambda: deepspeed.zero.Init(config_dict_or_path=configuration(case), **given),
        whole=lambda model: deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    )


def _optimizing(case: Case, model: nn.Module) -> dict[str, Any]:
    """What ``deepspeed.initialize`` is given to optimize with."""
    if case.optimizer_from == "client":
        return {"optimizer": optimizers.make(case, _trainable(model.parameters()))}
    if case.optimizer_from == "config":
        return {"model_parameters": _trainable(model.parameters())}
    # A callable is handed the parameters that are there after sharding, whatever modules AutoTP replaced.
    return {"optimizer": lambda parameters: optimizers.make(case, _trainable(parameters))}


# DeepSpeed's names of the optimizers: torch's own classes, no compiled ones.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {}),
    "adam": ("Adam", {"torch_adam": True, "adam_w_mode": False}),
    "adamw": ("AdamW", {"torch_adam": True}),
}


def configuration(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration of the case; every setting that a version might default otherwise is spelled out."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case.zero},
    }
    if case.optimizer_from == "config":
        kind, options = OPTIMIZERS[case.optimizer]
        config["optimizer"] = {"type": kind, "params": {**optimizers.SETTINGS[case.optimizer], **options}}
    if case.dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE[case.dtype]}
    if case.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        # By default gradients are summed and sent in bf16; without ZeRO another sum is refused.
        if case.zero > 0:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["communication_data_type"] = "fp32"
    if case.zero == 3:
        # By default stage 3 keeps parameters as small as these whole on every rank.
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    if case.tp > 1:
        config["tensor_parallel"] = {
            "autotp_size": case.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": _layer_specs(case)},
        }
        if case.head == "vocab":
            config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    return config


def _layer_specs(case: Case) -> list[dict[str, Any]]:
    def spec(names: Sequence[str], kind: str, **options: Any) -> dict[str, Any]:
        return {"patterns": [rf".*\b{name}\.weight$" for name in names], "partition_type": kind, **options}

    def end(name: str) -> dict[str, Any]:
        if case.head == "row":
            return spec([name], "row")
        return spec([name], "column", gather_output=case.head == "gathered")

    # The vocab head is asked for by an option of its own; an entry for it would be superseded.
    ends = [] if case.head in ("vocab", "unmatched") else [end("lm_head")]
    cut = case.embedding_cut
    embedding = end("embed_tokens") if cut == "as_head" else spec(["embed_tokens"], cut)
    if case.embedding_spec == "before_head":
        ends.insert(0, embedding)
    elif case.embedding_spec == "after_head":
        ends.append(embedding)
    return [*ends, spec(COLUMN, "column"), spec(ROW, "row")]


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


def _notice(notice: Notice, event: str, model: Decoder) -> None:
    notice(event, model.embed_tokens.weight, model.lm_head.weight)


def _install_loss(model: Decoder) -> None:
    """Call the sharded loss, where DeepSpeed put one in, with labels that are the next tokens already.

    Given as `labels` it would shift them once more.
    """
    replaced = model.loss_function
    if getattr(model, "_deepspeed_original_loss_function", None) is None:
        return

    def loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        return replaced(logits, shift_labels=labels, vocab_size=vocab_size)

    model.loss_function = loss


class DeepSpeedTrainer:
    """One rank's engine behind the interface `suites.paths.Trainer`."""

    def __init__(self, case: Case, engine: Any, device: torch.device, notice: Notice):
        self.case, self.device, self.notice = case, device, notice
        self.steps = 0
        self.checkpoint: dict[str, Piece] = {}
        self._take(engine)

    def _take(self, engine: Any) -> None:
        self.engine = engine
        self.names = tuple(parameter_shapes(self.case))
        sharded = groups._TENSOR_MODEL_PARALLEL_GROUP is not None
        self.tp_rank = dist.get_rank(groups.get_tensor_model_parallel_group()) if sharded else 0
        self.dp_rank = groups._get_data_parallel_rank()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Live parameters by canonical name; at ZeRO 3 their local data is usually empty (see `weights`)."""
        return {name: self.engine.module.get_parameter(name) for name in self.names}

    def module(self) -> nn.Module:
        """The live sharded model."""
        return self.engine.module

    def layout(self) -> Mapping[str, str]:
        """Class of the live module that holds each parameter."""
        return {n: type(self.engine.module.get_submodule(n.rpartition(".")[0])).__name__ for n in self.names}

    def forward_backward(self, micro: MicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        """Loss of this micro-batch alone and logits [batch, sequence, local or full vocabulary]."""
        loss, logits = self.engine(micro.tokens, micro.labels)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch; the update waits for the last one
        return loss.detach(), logits.detach()

    def gradients(self) -> Mapping[str, Piece]:
        """This rank's own part of each trainable parameter's gradient, as the optimizer gets it, before clipping."""
        trained = {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}
        if self.case.dtype in LOW:
            return {name: low_gradient_piece(parameter, self.dp_rank) for name, parameter in trained.items()}
        return {name: gradient_piece(parameter, self.case.zero, self.dp_rank) for name, parameter in trained.items()}

    def step(self) -> float | None:
        """Clip, update, clear gradients. Norm before clipping; None at ZeRO 0, where DeepSpeed does not report one.

        After the first step, resume if the case says so.
        """
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        self.steps += 1
        if self.case.resume != "none" and self.steps == 1:
            self.resume()
        return None if norm is None else float(norm)

    def resume(self) -> None:
        """Save, tear down, build anew with other weights, load: as a run does that was stopped and is resumed."""
        universal = self.case.resume == "universal"
        with checkpoints.shared_folder(self.device) as folder:
            with contextlib.redirect_stdout(sys.stderr):
                self.engine.save_checkpoint(str(folder / "saved"), tag=checkpoints.TAG)
                if universal:
                    held = {**self.weights(), **self.masters()}
                    self.checkpoint = {f"held:{name}": piece for name, piece in held.items()}
                    checkpoints.make_universal(folder)
                    self.checkpoint |= checkpoints.universal_files(folder) if dist.get_rank() == 0 else {}
            self._end()
            more = {"checkpoint": {"load_universal": True}} if universal else {}
            self._take(start_engine(self.case.but(seed=self.case.seed + 1), self.device, lambda *_: None, more))
            with contextlib.redirect_stdout(sys.stderr):
                checkpoints.load(self.engine, folder, universal=universal)
        _notice(self.notice, "resumed", self.engine.module)

    def saved(self) -> Mapping[str, Piece]:
        """What the files of a universal checkpoint hold, on the first rank, and what each rank held as it was saved."""
        return self.checkpoint

    def weights(self) -> Mapping[str, Piece]:
        """This rank's part of each parameter as the model computes with it."""
        return {name: weight_piece(parameter, self.dp_rank) for name, parameter in self.parameters().items()}

    def masters(self) -> Mapping[str, Piece]:
        """This rank's part of each fp32 master weight under bf16; in fp32, ZeRO's copy is the weight itself."""
        if self.case.dtype not in LOW:
            return {}
        found = {
            name: master_piece(parameter, self.engine.optimizer, self.dp_rank)
            for name, parameter in self.parameters().items()
            if parameter.requires_grad
        }
        return {name: piece for name, piece in found.items() if piece is not None}

    def optimized(self) -> Sequence[Tensor]:
        """The model's parameters that the optimizer updates, once per mention; ZeRO's flat buffers stand for theirs."""
        optimizer = self.engine.optimizer
        for attribute in ("bit16_groups", "fp16_groups", "bf16_groups"):  # ZeRO 1 and 2; ZeRO 3; ZeRO 1 in bf16
            if hasattr(optimizer, attribute):
                return [p for group in getattr(optimizer, attribute) for p in group]
        return [p for group in optimizer.param_groups for p in group["params"]]

    def zero_stage(self) -> int:
        """By the class of the live optimizer, and whether it partitions gradients."""
        optimizer = self.engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            return 3
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            return 2 if optimizer.partition_gradients else 1
        return 1 if isinstance(optimizer, BF16_Optimizer) else 0

    def close(self) -> None:
        """Destroy engine and process groups: neither hooks nor groups nor memory pass on to the next case."""
        self._end()

    def _end(self) -> None:
        engine, self.engine = self.engine, None
        try:
            engine.destroy()
        finally:
            del engine
            _forget()
            gc.collect()  # engines are full of cycles, and hold tensors and process groups


def _prepare(device: torch.device) -> None:
    """Make DeepSpeed ready for this process's default group; compiles nothing on CPU."""
    kind = get_accelerator().device_name()
    if kind.partition(":")[0] != device.type:
        raise RuntimeError(
            f"DeepSpeed was imported for {kind} and the case runs on {device.type}: set DS_ACCELERATOR={device.type}"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    rank = dist.get_rank()
    os.environ.setdefault("LOCAL_RANK", str(device.index if device.index is not None else rank))
    if device.type == "cpu":
        # Compiling this op takes minutes, and a killed compilation leaves a lock on which every later run waits.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _forget()
    deepspeed.init_distributed(verbose=False)  # takes the process group that is up


def _forget() -> None:
    """Take back what DeepSpeed's modules remember of a case, and destroy the process groups that it made."""
    parameter_offload.FWD_MODULE_STACK.clear()  # ZeRO 3 puts each model here and never takes it off
    for method in vars(PartitionedParameterCoordinator).values():  # … and in a cache of one of its methods
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
    mine = {id(g): g for g in (getattr(groups, name, None) for name in REMEMBERED_GROUPS) if g is not None}
    for name in (*REMEMBERED_GROUPS, *REMEMBERED_VALUES):
        if hasattr(groups, name):
            setattr(groups, name, None)
    for group in mine.values():
        if dist.is_initialized() and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    deepspeed.set_autotp_mode(training=False)  # as after import; an engine with tensor parallelism turns it on
    deepspeed.comm.comm.cdb = None  # holds the default group of this moment
