"""Pictures of class activation maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mrla_mm.analysis.cams import CamMap, Target


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
    height, width = found[0].picture.shape[:2]
    side = 2.3 * (height / width) ** 0.5  # panels of one area, whatever their aspect
    figure = Figure(figsize=(columns * side * width / height, len(found) * (side + 0.42)), layout="constrained")
    grid = figure.subplots(len(found), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, one in enumerate(found):
        draw_prediction(grid[row, 0], one)
        for axes, cam in zip(grid[row, 1:], one.maps, strict=False):
            draw_map(axes, one, cam)
        if not one.maps:
            grid[row, 1].text(0.5, 0.5, "not found by\nthis model", ha="center", va="center", fontsize=9)
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_file, dpi=130)
    return out_file


def draw_prediction(axes, one: Explanation) -> None:
    """Draw what the model saw, with the box that is explained, and the score."""
    axes.imshow(one.picture)
    if one.target.box is not None:
        left, top, right, bottom = one.target.box.tolist()
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="red", linewidth=1.5))
    axes.set_title(f"{one.model}\n{one.class_name}: {one.score:.3g}", fontsize=7)


def draw_map(axes, one: Explanation, cam: CamMap) -> None:
    """Lay a map over the picture."""
    height, width = one.picture.shape[:2]
    axes.imshow(one.picture)
    extent = (0, one.input_size[1], one.input_size[0], 0)
    axes.imshow(cam.values, cmap="turbo", alpha=0.55, extent=extent, interpolation="bilinear", vmin=0, vmax=1)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_title(f"{cam.method}\n{cam.layer}", fontsize=7)
