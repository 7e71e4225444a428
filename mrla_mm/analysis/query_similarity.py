"""Are the queries of consecutive layers alike? The assumption of Eq. 7 behind MRLA-light (Fig. 2b of the paper).

For a layer t > 1 of a stage, and each head h of each image,

    abs(cos(q^t_h, q^{t-1}_h)) = abs(q^t_h . q^{t-1}_h) / (norm(q^t_h) norm(q^{t-1}_h))

is 1 where a head's queries are proportional, which is what lets lambda^t stand for the change of the query.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from mrla_mm.analysis.listening import BranchListener, attended_map
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.errors import InputError

BINS = 25


class StageSimilarity(NamedTuple):
    """Similarities in a stage.

    Attributes:
        number: of the stage in the model, from 1.
        layers: names of the residual branches, from the second layer on: each is compared with the one before.
        firsts: number in the stage, from 1, of the first of them.
        values: (images, layers, G), absolute cosine of each head.
    """

    number: int
    layers: tuple[str, ...]
    firsts: int
    values: Tensor


class QueryRecorder(BranchListener):
    """Record how alike the queries of consecutive layers are, as the model runs inside.

    Raises:
        InputError: the model has no layer attention, or one without queries.

    Example:
        >>> import torch
        >>> from mrla_mm.analysis.query_similarity import QueryRecorder
        >>> from mrla_mm.backbones import MRLAResNet
        >>> backbone = MRLAResNet(50, layer_attention=dict(type="MRLABase")).eval()
        >>> with torch.no_grad(), QueryRecorder(backbone) as recorder:
        ...     _ = backbone(torch.rand(2, 3, 64, 64))
        >>> [tuple(stage.values.shape) for stage in recorder.stages()]
        [(2, 2, 8), (2, 3, 16), (2, 5, 32), (2, 2, 64)]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for name, branch in self.branches.items():
            if not hasattr(branch.attention, "query"):
                raise InputError(f"{name} has no queries (gated=False), so there is nothing to compare")
        self._values: dict[str, list[Tensor]] = {}
        self._previous: Tensor | None = None

    def stages(self, *, skip_first: bool = False) -> list[StageSimilarity]:
        """Return the similarities of each stage, in the order in which the stages ran.

        Args:
            skip_first: leave out the pair with the query of a stage's first layer, as the paper does: that layer
                attends only to itself.

        Raises:
            InputError: no stage has a pair left.
        """
        start = 2 if skip_first else 1
        found = []
        for number, names in enumerate(self.stage_names, 1):
            if len(names) > start:
                values = torch.stack([torch.cat(self._values[name]) for name in names[start:]], 1)
                found.append(StageSimilarity(number, tuple(names[start:]), start + 1, values))
        if not found:
            raise InputError(f"no stage of the model has {start + 1} layers, so there is no pair of queries to compare")
        return found

    def hear(self, name: str, branch: LayerAttentionResidual, given: dict, result: tuple) -> None:
        """Compare a layer's query with that of the layer before it."""
        query = branch.attention.query_and_key(attended_map(branch, given))[0].float()
        if not branch.attention.first_in_stage:
            similarity = F.cosine_similarity(query, self._previous, dim=-1).abs()
            self._values.setdefault(name, []).append(similarity.cpu())  # (B, G)
        self._previous = query

    def forget(self) -> None:
        """Drop the last query."""
        self._previous = None


def plot_histograms(models: Sequence[tuple[str, Sequence[StageSimilarity]]], out_file: str | Path) -> Path:
    """Draw a row of histograms for each model, a panel for each stage, all on the same axes.

    Args:
        models: name and similarities of each.
        out_file: picture to write; its folder is made.
    """
    columns = max(stage.number for _, stages in models for stage in stages)
    figure = Figure(figsize=(2.7 * columns + 0.9, 2.2 * len(models) + 0.8), layout="constrained")
    grid = figure.subplots(len(models), columns, squeeze=False, sharex=True, sharey=True)
    for row, (name, stages) in enumerate(models):
        by_number = {stage.number: stage for stage in stages}
        for column, axes in enumerate(grid[row], 1):
            if column not in by_number:
                axes.set_axis_off()
                continue
            draw_histogram(axes, by_number[column].values.flatten().numpy(), f"stage {column}", f"C{row}")
        first = min(by_number) - 1
        grid[row, first].set_ylabel(f"{name}\n% of pairs", fontsize=8)
        grid[row, first].tick_params(labelleft=True)
    figure.supxlabel("|cosine similarity| of a head's queries in consecutive layers", fontsize=10)
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_file, dpi=130)
    return out_file


def draw_histogram(axes, values: np.ndarray, title: str, colour: str) -> None:
    """Draw the share of values in each of `BINS` bins from 0 to 1, and their median."""
    axes.hist(values, bins=BINS, range=(0, 1), weights=np.full(len(values), 100 / len(values)), color=colour, alpha=0.8)
    median = float(np.median(values))
    axes.axvline(median, color="black", linewidth=1, linestyle="--")
    axes.set_title(f"{title}: {len(values)} pairs, median {median:.2f}", fontsize=8)
    axes.set_xlim(0, 1)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)


def write_csv(models: Sequence[tuple[str, Sequence[StageSimilarity]]], out_file: str | Path) -> Path:
    """Write a line for each model, stage, layer and head: mean, least and largest similarity over the images."""
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    with out_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "stage", "layer", "layer_name", "head", "images", "mean", "min", "max"])
        for model, stages in models:
            for stage in stages:
                for index, name in enumerate(stage.layers):
                    for head, values in enumerate(stage.values[:, index].unbind(-1), 1):
                        figures = (f"{value:.6g}" for value in (values.mean(), values.min(), values.max()))
                        layer = stage.firsts + index
                        writer.writerow([model, stage.number, layer, name, head, len(values), *figures])
    return out_file
