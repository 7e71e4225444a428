"""Rows of pictures side by side, each under a title."""

import textwrap
from pathlib import Path

import cv2
import numpy as np
from matplotlib.figure import Figure

SIDE = 2.2  # inches of a square picture; others get the same area
TITLE_SIZE = 7
_LETTERS_AN_INCH = 18  # of that size


def panel_figure(rows: int, columns: int, picture: np.ndarray) -> tuple[Figure, np.ndarray]:
    """Return a figure and its (rows, columns) panels for pictures of one shape.

    Args:
        rows: of panels.
        columns: of panels.
        picture: (height, width, 3), one of the pictures.
    """
    height, width = picture.shape[:2]
    size = SIDE * (width / height) ** 0.5, SIDE * (height / width) ** 0.5
    figure = Figure(figsize=(columns * (size[0] + 0.1), rows * (size[1] + 0.45)), layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    figure.panel_width = size[0]
    return figure, grid


def set_title(axes, *lines: str) -> None:
    """Put lines above a panel, each broken where it is wider than the panel."""
    letters = max(10, int(axes.figure.panel_width * _LETTERS_AN_INCH))
    broken = [part for line in lines for part in textwrap.wrap(line, letters)]
    axes.set_title("\n".join(broken), fontsize=TITLE_SIZE)


def save(figure: Figure, out_file: str | Path) -> Path:
    """Write a figure without the margin around its panels; the folder is made."""
    out_file = Path(out_file)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_file, dpi=130, bbox_inches="tight", pad_inches=0.05)
    return out_file


def greyscale(image: np.ndarray) -> np.ndarray:
    """Return an image (H, W, 3) uint8, RGB, without its colours, as a ground for coloured maps."""
    return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def lay_map_over(axes, values: np.ndarray, picture: np.ndarray, *, size: tuple[float, float], **range_: float) -> None:
    """Lay a map, warm where it is large, over a grey picture.

    Args:
        axes: panel.
        values: (h, w).
        picture: (H, W, 3) uint8, RGB.
        size: height and width in pixels of the picture that the map covers, which may reach beyond it.
        range_: vmin and vmax of the colours.
    """
    height, width = picture.shape[:2]
    axes.imshow(greyscale(picture), extent=(0, width, height, 0))
    extent = (0, size[1], size[0], 0)
    axes.imshow(values, cmap="turbo", alpha=0.55, extent=extent, interpolation="bilinear", **range_)
    axes.set(xlim=(0, width), ylim=(height, 0))
