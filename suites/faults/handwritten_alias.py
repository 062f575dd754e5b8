"""Classes 1, 2, 3 and 26: the tie is lost when modules are built, loaded, replaced or resized, or made where there is
none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from suites import model as models
from suites import train
from suites.cases import Case
from suites.faults.pieces import (
    EVEN_ROW,
    EVEN_VOCAB,
    ROW,
    UNTIED_ROW,
    UNTIED_VOCAB,
    VOCAB,
    after_sharding,
    before_sharding,
    separate,
)
from suites.faults.table import Replacement, Table
from suites.model import EMBEDDING, Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
TIED = "tie=tied"


@TABLE.fault(1, needs=TIED, case=ROW, invisible=UNTIED_ROW, caught_by=("tie", "gradient"))
def copied_tie() -> list[Replacement]:
    """The head's weight is a copy after sharding."""
    return [after_sharding(lambda model, case, mesh: separate(model.lm_head))]


@TABLE.fault(1, needs="tie_when=meta", case=ROW + ",tie_when=meta", invisible=ROW, caught_by=("tie", "gradient"))
def tie_not_remade_after_meta() -> list[Replacement]:
    """A flag says that the model is tied, so it is not tied again after to_empty gave both a storage."""
    original = Decoder.tie

    def broken(self: Any) -> None:
        if not getattr(self, "tied_already", False):
            self.tied_already = True
            original(self)

    return [(Decoder, "tie", broken)]


@TABLE.fault(1, needs=TIED, case=VOCAB, invisible=UNTIED_VOCAB, caught_by=("tie", "gradient"))
def loaded_by_assignment() -> list[Replacement]:
    """Loading assigns a new parameter to every name, as load_state_dict(assign=True) does."""
    original = models.load_weights

    def broken(model: nn.Module, weights: Any) -> None:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter)))
        original(model, weights)

    return [(models, "load_weights", broken)]


@TABLE.fault(2, needs=TIED, case=VOCAB, invisible=UNTIED_VOCAB, caught_by=("tie", "gradient"))
def cut_per_module() -> list[Replacement]:
    """Each module cuts its own shard, so the first replacement breaks the tie."""
    original = hw.Sharder.cut

    def broken(self: hw.Sharder, whole: Tensor, dim: int) -> nn.Parameter:
        self._shards.clear()
        return original(self, whole, dim)

    return [(hw.Sharder, "cut", broken)]


@TABLE.fault(
    2, needs="register=head_first", case=ROW + ",register=head_first", invisible=ROW, caught_by=("tie", "gradient")
)
def tie_found_by_first_name() -> list[Replacement]:
    """The tie is looked for under the embedding's name, which the list of parameters lacks if the head came first."""
    listed: list[bool] = []

    def look(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        listed[:] = [EMBEDDING in dict(model.named_parameters())]

    def lose(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        if not listed[0]:
            separate(model.embed_tokens)

    original = hw.shard_model

    def broken(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        look(model, case, mesh)
        original(model, case, mesh)
        lose(model, case, mesh)

    return [(hw, "shard_model", broken)]


@TABLE.fault(
    2,
    needs="tie_when=after_shard",
    case=VOCAB + ",tie_when=after_shard",
    invisible=VOCAB,
    caught_by=("tie", "gradient"),
)
def replaced_after_the_tie() -> list[Replacement]:
    """The head is replaced once more after the sharded model was tied, with the shard that it had before."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        if case.tied and case.tie_when == "after_shard":
            separate(model.lm_head)

    return [after_sharding(change)]


@TABLE.fault(3, needs="tie=untied", case=UNTIED_ROW, invisible=EVEN_ROW, caught_by=("tie", "census"))
def unwanted_tie() -> list[Replacement]:
    """An untied model is tied after it was sharded."""
    return [after_sharding(lambda model, case, mesh: model.tie())]


@TABLE.fault(3, needs="tie=untied", case=UNTIED_VOCAB, invisible=EVEN_VOCAB, caught_by=("tie", "start", "census"))
def tied_by_shape() -> list[Replacement]:
    """Embedding and head are taken for one weight because their shapes are equal."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        if model.lm_head.weight.shape == model.embed_tokens.weight.shape:
            model.tie()

    return [before_sharding(change)]


@TABLE.fault(3, needs="tie=untied", case=UNTIED_ROW, invisible=EVEN_ROW, caught_by=("tie",))
def tie_detector_compares_shapes() -> list[Replacement]:
    """The harness calls two weights one when their shapes are equal, and so finds a tie in every model."""
    return [(train, "same_storage", lambda a, b: a.shape == b.shape)]


@TABLE.fault(26, needs="vocab not divisible by 8", case=ROW + ",vocab=67", invisible=ROW, caught_by=("tie", "gradient"))
def resized_embedding() -> list[Replacement]:
    """The vocabulary is padded to a multiple of 8 for loading and cut back, in a new embedding that nobody ties."""
    original = models.load_weights

    def broken(model: nn.Module, weights: Any) -> None:
        original(model, weights)
        old: Any = model.get_parameter(EMBEDDING)
        if extra := -len(old) % 8:
            grown = torch.cat([old.detach(), old.new_zeros(extra, old.shape[1])])
            model.get_submodule("embed_tokens").weight = nn.Parameter(grown[: len(old)].clone())

    return [(models, "load_weights", broken)]


@TABLE.fault(
    26,
    needs="padding_idx, tie=tied",
    case=VOCAB + ",padding_idx=3",
    invisible=VOCAB,
    caught_by=("tie", "gradient"),
)
def embedding_made_anew_for_padding() -> list[Replacement]:
    """A padding row is set after loading by making the embedding anew from the old one's values."""
    original = models.load_weights

    def broken(model: nn.Module, weights: Any) -> None:
        original(model, weights)
        embedding: Any = model.get_submodule("embed_tokens")
        if embedding.padding_idx is not None:
            embedding.weight = nn.Parameter(embedding.weight.detach().clone())

    return [(models, "load_weights", broken)]


@TABLE.fault(
    26,
    needs="dtype other than float32",
    case=EVEN_VOCAB + ",dtype=float64",
    invisible=EVEN_VOCAB,
    caught_by=("tie", "gradient"),
)
def cast_head() -> list[Replacement]:
    """The head's weight is cast to fp32 and back by a method that makes a new parameter where it has work to do."""
    original = models.load_weights

    def broken(model: nn.Module, weights: Any) -> None:
        original(model, weights)
        head: Any = model.get_submodule("lm_head")
        if head.weight.dtype != torch.float32:
            head.weight = nn.Parameter(head.weight.detach().float().to(head.weight.dtype))

    return [(models, "load_weights", broken)]
