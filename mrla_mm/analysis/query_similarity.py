"""How similar are the queries of consecutive layers? MRLA-light assumes that they are (Eq. 7).

For each layer t > 1 of a stage and each head h of an image this is the absolute cosine

    abs(cos(q^t_h, q^{t-1}_h)) = abs(q^t_h . q^{t-1}_h) / (norm(q^t_h) norm(q^{t-1}_h)),

which is 1 where the two queries are proportional, so that lambda^t can stand for the change of the
query. The paper's Fig. 2b shows its histogram.
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

from mrla_mm.analysis.layer_attention import BranchRecorder
from mrla_mm.attention import LayerAttention
from mrla_mm.errors import InputError
from mrla_mm.ops import global_average


class StageSimilarity(NamedTuple):
    """Similarities in a stage; each layer is compared with the one before it."""

    number: int  # of the stage in the model, from 1
    first: int  # number of the first layer in `layers`, from 1
    layers: tuple[str, ...]  # names of the residual branches
    values: Tensor  # (images, layers, G), absolute cosine of each head


class QueryRecorder(BranchRecorder):
    """Record how similar the queries of consecutive layers are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._previous: Tensor | None = None

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


def plot_histograms(
    models: Sequence[tuple[str, Sequence[StageSimilarity]]], out_file: str | Path
) -> None:
    """Draw a row of histograms for each named model, a panel for each stage, on the same axes."""
    columns = max(stage.number for _, stages in models for stage in stages)
    figure = Figure(figsize=(2.7 * columns + 0.9, 2.2 * len(models) + 0.8), layout="constrained")
    grid = figure.subplots(len(models), columns, squeeze=False, sharex=True, sharey=True)
    for row, (name, stages) in enumerate(models):
        grid[row, 0].set_ylabel(f"{name}\n% of pairs", fontsize=8)
        for stage in stages:
            axes, values = grid[row, stage.number - 1], stage.values.flatten().numpy()
            share, median = np.full(len(values), 100 / len(values)), np.median(values)
            axes.hist(values, bins=25, range=(0, 1), weights=share, color=f"C{row}", alpha=0.8)
            axes.axvline(median, color="black", linewidth=1, linestyle="--")
            title = f"stage {stage.number}: {len(values)} pairs, median {median:.2f}"
            axes.set_title(title, fontsize=8)
    figure.supxlabel("|cosine similarity| of a head's queries in consecutive layers", fontsize=10)
    figure.savefig(out_file, dpi=130)


def write_csv(
    models: Sequence[tuple[str, Sequence[StageSimilarity]]], out_file: str | Path
) -> None:
    """Write the mean, minimum and maximum over the images for each model, stage, layer and head."""
    with Path(out_file).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        place = "model", "stage", "layer", "layer_name", "head"
        writer.writerow([*place, "images", "mean", "min", "max"])
        for name, stages in models:
            for stage in stages:
                for index, head in np.ndindex(*stage.values.shape[1:]):
                    values = stage.values[:, index, head]
                    place = stage.number, stage.first + index, stage.layers[index], head + 1
                    figures = values.mean(), values.min(), values.max()
                    row = [name, *place, len(values), *(f"{value:.6g}" for value in figures)]
                    writer.writerow(row)
