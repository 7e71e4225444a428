"""How similar are the queries of consecutive layers? MRLA-light assumes that they are (Eq. 7).

For each layer t > 1 of a stage and each head h of an image this is the absolute cosine

    abs(cos(q^t_h, q^{t-1}_h)) = abs(q^t_h . q^{t-1}_h) / (norm(q^t_h) norm(q^{t-1}_h)),

which is 1 where the two queries are proportional, so that lambda^t can stand for the change of the
query. The paper's Fig. 2b shows its histogram.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrla_mm.analysis.layer_attention import BranchRecorder
from mrla_mm.attention import LayerAttention
from mrla_mm.errors import InputError
from mrla_mm.functional import global_average


class StageSimilarity(NamedTuple):
    """Similarities in a stage; each layer is compared with the one before it."""

    number: int  # of the stage in the model, from 1
    first: int  # number of the first layer in `layers`, from 1
    layers: tuple[str, ...]  # names of the residual branches
    values: Tensor  # (images, layers, G), absolute cosine of each head


class QueryRecorder(BranchRecorder):
    """Record how similar the queries of consecutive layers are."""

    _previous: Tensor | None = None  # the query of the layer before

    @staticmethod
    def supports(attention: nn.Module) -> bool:
        """Whether the attention has queries; MRLA-light with gated=False has none."""
        has_query = getattr(attention, "query", None) is not None
        return has_query and isinstance(attention, LayerAttention)

    def stages(self, *, skip_first: bool = False) -> list[StageSimilarity]:
        """Return the similarities of each stage, in the order in which the stages ran.

        With `skip_first`, as in the paper, the pair with a stage's first layer is left out: it
        attends only to itself.
        """
        start = 2 if skip_first else 1
        found = []
        for number, names in enumerate(self.stage_names, 1):
            if len(names) > start:
                values = torch.stack([torch.cat(self.values[name]) for name in names[start:]], 1)
                found.append(StageSimilarity(number, start + 1, tuple(names[start:]), values))
        if not found:
            raise InputError(f"no stage has {start + 1} layers, so there are no queries to compare")
        return found

    def on_forward(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """Compare a layer's query with that of the layer before it, (B, G)."""
        attention = self.branches[name].attention
        query = attention.project_query(global_average(x)).float()  # (B, G, D)
        last = query if attention.first_in_stage else self._previous
        self._previous = query
        return F.cosine_similarity(query, last, dim=-1).abs()
