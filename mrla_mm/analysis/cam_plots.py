"""Pictures of class activation maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle

from mrla_mm.analysis.cams import CamMap, Target
from mrla_mm.analysis.panels import lay_map_over, panel_figure, save, set_title


class Explanation(NamedTuple):
    """What a model says about an image and why; no maps where it does not find the target.

    Attributes:
        model: name of the model.
        picture: (height, width, 3) uint8, RGB, what the model saw.
        input_size: height and width of its padded input, which the maps cover.
        target: what is explained.
        class_name: of the target.
        score: of the target.
        maps: by method and layer.
    """

    model: str
    picture: np.ndarray
    input_size: tuple[int, int]
    target: Target
    class_name: str
    score: float
    maps: Sequence[CamMap]


def plot_explanations(found: Sequence[Explanation], out_file: str | Path) -> Path:
    """Draw a row for each model: what it saw with its prediction, and its maps, warm where they speak for it.

    Args:
        found: by model; each with maps has the same number of them.
        out_file: picture to write; its folder is made.
    """
    columns = 1 + max(1, *(len(one.maps) for one in found))
    figure, grid = panel_figure(len(found), columns, found[0].picture)
    for row, one in enumerate(found):
        draw_prediction(grid[row, 0], one)
        for axes, cam in zip(grid[row, 1:], one.maps, strict=False):
            lay_map_over(axes, cam.values, one.picture, size=one.input_size, vmin=0, vmax=1)
            set_title(axes, cam.method, cam.layer)
        if not one.maps:
            grid[row, 1].text(0.5, 0.5, "not found by\nthis model", ha="center", va="center", fontsize=9)
    return save(figure, out_file)


def draw_prediction(axes, one: Explanation) -> None:
    """Draw what the model saw, with the box that is explained, and the score."""
    axes.imshow(one.picture)
    if one.target.box is not None:
        left, top, right, bottom = one.target.box.tolist()
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="red", linewidth=1.5))
    set_title(axes, one.model, f"{one.class_name}: {one.score:.3g}")
