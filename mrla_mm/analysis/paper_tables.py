"""The paper's tables: which models they compare, and by which figures."""

from collections.abc import Sequence
from typing import NamedTuple

from mrla_mm.analysis.paper_rows import BOX, MASK, MEMORY, ROWS, TOP, PaperRow


class PaperTable(NamedTuple):
    """One of the paper's tables.

    Attributes:
        number: the paper's.
        title: what it compares.
        metrics: names of its figures.
        models: its rows, by `PaperRow.model`.
    """

    number: str
    title: str
    metrics: Sequence[str]
    models: Sequence[str]


def named(*starts: str) -> list[str]:
    """Models whose plain part is one of these names, in the order of `ROWS`, the ablations left out."""
    usual = ("", "base", "light", "MLA")
    split = {row.model: row.model.partition(" + ") for row in ROWS}
    return [model for model, (plain, _, added) in split.items() if plain in starts and added in usual]


R50, R101 = "ResNet-50", "ResNet-101"
CLASSIFIERS = [model for model in named(*(row.model for row in ROWS if not row.is_detector)) if "MLA" not in model]
MASKS = ["Mask R-CNN R50", "Mask R-CNN R50 + light", "Mask R-CNN R101", "Mask R-CNN R101 + light"]
TABLES: tuple[PaperTable, ...] = (
    PaperTable("1", "ImageNet-1K classification", TOP, [model for model in CLASSIFIERS if model != f"{R101} + base"]),
    PaperTable(
        "2",
        "Object detection on COCO val2017",
        BOX,
        named(*(f"{head} R{depth}" for head in ("Faster R-CNN", "RetinaNet") for depth in (50, 101))),
    ),
    PaperTable(
        "3",
        "Detection and instance segmentation, Mask R-CNN on COCO val2017",
        (*BOX[:3], *MASK[:3]),
        named("Mask R-CNN R50", "Mask R-CNN R101"),
    ),
    PaperTable(
        "4",
        "Ablations on ResNet-50",
        TOP[:1],
        [
            f"{R50} + MLA",
            f"{R50} + base",
            f"{R50} + light",
            *(row.model for row in ROWS if row.model.startswith(f"{R50} + light (") and "M, LS" not in row.model),
            f"{R50} + DWConv2d",
        ],
    ),
    PaperTable(
        "5",
        "Networks with interaction of layers (App. B.1)",
        TOP,
        [R50, f"{R50} + base", f"{R50} + light", R101, f"{R101} + light"],
    ),
    PaperTable("6", "The recipe of BA-Net (App. B.1)", TOP, [f"{R50} + light", f"{R50} + light, BA-Net's recipe"]),
    PaperTable(
        "7",
        "Memory for each GPU, 64 images on it (App. B.2)",
        MEMORY,
        [f"{net} + {variant}" for net in (R50, R101) for variant in ("MLA", "base", "light")],
    ),
    PaperTable("8", "Mask R-CNN, boxes in full (App. B.3)", BOX, MASKS),
    PaperTable("9", "Mask R-CNN, masks in full (App. B.3)", MASK, MASKS),
    PaperTable("10", "RetinaNet beside other backbones (App. B.3)", BOX, ["RetinaNet R101", "RetinaNet R101 + light"]),
    PaperTable(
        "11",
        "Transformers (App. B.4)",
        TOP,
        [
            "DeiT-T",
            "DeiT-T + DWConv",
            "DeiT-T + light",
            *(f"{name}{added}" for name in ("CeiT-T", "CeiT-S", "PVTv2-B0", "PVTv2-B1") for added in ("", " + light")),
        ],
    ),
    PaperTable(
        "12",
        "Stochastic depth (App. B.4)",
        TOP[:1],
        [R50, f"{R50} + DWConv2d", f"{R50} + DWConv2d with stochastic depth", f"{R50} + light (M, LS)"],
    ),
)


def find_row(model: str) -> PaperRow:
    """Return the row of a model."""
    return next(row for row in ROWS if row.model == model)


def table_of(row: PaperRow) -> PaperTable:
    """Return the first table that has the row."""
    return next(table for table in TABLES if row.model in table.models)
