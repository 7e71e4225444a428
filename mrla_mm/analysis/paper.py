"""What the paper states of its models' size and cost, beside the configs of this package that name the same models.

Source: Tables 1 to 3 (tab:imagenet_class, tab:coco_det, tab:coco_mask) and the memory table of App. B.2 (tab:oom) of
"Cross-Layer Retrospective Retrieving via Layer Attention", ICLR 2023. Figures are the paper's, in millions of
parameters and billions of FLOPs (multiply-adds). Detectors get images of 1280 x 800, and their parameters leave out the
frozen stem and first stage, which is how the paper's totals come out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mrla_mm.analysis.complexity import Complexity

DETECTION_SHAPE = (800, 1280)


class PaperRow(NamedTuple):
    """A row of one of the paper's tables, and the config of the model it is about.

    Attributes:
        table: the paper's.
        model: in the paper's words.
        config: name below configs/, without its suffix.
        parameters: the paper's, in millions.
        operations: the paper's, in billions; None where the table has no such column.
        shape: (height, width) of the image.
        options: overrides of the config, for a model that has none of its own.
    """

    table: str
    model: str
    config: str
    parameters: float
    operations: float | None
    shape: tuple[int, int] = (224, 224)
    options: Mapping[str, object] = {}

    @property
    def is_detector(self) -> bool:
        """Whether the row is about a detector."""
        return self.shape == DETECTION_SHAPE


def resnet(depth: int, variant: str, parameters: float, operations: float, table: str = "1") -> PaperRow:
    """Row of a classifier on ResNet; a depth without a plain or MLA config of its own takes ResNet-50's."""
    suffix = {"plain": "", "light": "_mrla_light", "base": "_mrla_base", "MLA": "_mla"}[variant]
    own = depth == 50 or suffix.startswith("_mrla")
    config = f"imagenet/resnet{depth if own else 50}{suffix}_8xb32"
    options = {} if own else {"model.backbone.depth": depth}
    name = f"ResNet-{depth}" + ("" if variant == "plain" else f" + {variant}")
    return PaperRow(table, name, config, parameters, operations, options=options)


def detector(head: str, depth: int, variant: str, parameters: float, operations: float | None = None) -> PaperRow:
    """Row of a detector on ResNet."""
    name = {"retinanet": "RetinaNet", "faster_rcnn": "Faster R-CNN", "mask_rcnn": "Mask R-CNN"}[head]
    suffix = "" if variant == "plain" else f"_mrla_{variant}"
    model = f"{name} R{depth}" + ("" if variant == "plain" else f" + {variant}")
    table = "3" if head == "mask_rcnn" else "2"
    return PaperRow(table, model, f"{head}_r{depth}{suffix}_1x", parameters, operations, DETECTION_SHAPE)


def family(
    name: str, stem: str, batch: int, rows: Sequence[tuple[str, float, float]], size: int = 224
) -> Iterator[PaperRow]:
    """Rows of a classifier of another family, by (variant, parameters, operations)."""
    for variant, parameters, operations in rows:
        suffix = "" if variant == "plain" else f"_mrla_{variant}"
        label = name + (f" at {size}" if size != 224 else "") + ("" if variant == "plain" else f" + {variant}")
        yield PaperRow("1", label, f"imagenet/{stem}{suffix}_8xb{batch}", parameters, operations, (size, size))


ROWS: tuple[PaperRow, ...] = (
    resnet(50, "plain", 25.6, 4.1),
    resnet(50, "base", 25.7, 4.6),
    resnet(50, "light", 25.7, 4.2),
    resnet(101, "plain", 44.5, 7.8),
    resnet(101, "light", 44.9, 7.9),
    resnet(152, "plain", 60.2, 11.6),
    resnet(152, "light", 60.7, 11.7),
    *family("EfficientNet-B0", "efficientnet_b0", 96, [("plain", 5.3, 0.4), ("base", 5.3, 0.6), ("light", 5.3, 0.5)]),
    *family(
        "EfficientNet-B1", "efficientnet_b1", 96, [("plain", 7.8, 0.7), ("base", 7.8, 0.9), ("light", 7.8, 0.8)], 240
    ),
    *family("DeiT-T", "deit_tiny", 128, [("plain", 5.7, 1.2), ("base", 5.7, 1.4), ("light", 5.7, 1.2)]),
    *family("DeiT-S", "deit_small", 128, [("plain", 22.1, 4.5), ("light", 22.1, 4.6)]),
    *family("DeiT-B", "deit_base", 128, [("plain", 86.4, 16.8), ("light", 86.5, 16.9)]),
    *family("CeiT-T", "ceit_tiny", 128, [("plain", 6.4, 1.4), ("light", 6.4, 1.4)]),
    *family("CeiT-T", "ceit_tiny", 128, [("plain", 6.4, 5.1), ("light", 6.4, 5.1)], 384),
    *family("CeiT-S", "ceit_small", 128, [("plain", 24.2, 4.8), ("light", 24.3, 4.9)]),
    *family("PVTv2-B0", "pvtv2_b0", 128, [("plain", 3.4, 0.6), ("base", 3.4, 0.9), ("light", 3.4, 0.7)]),
    *family("PVTv2-B1", "pvtv2_b1", 128, [("plain", 13.1, 2.3), ("light", 13.2, 2.4)]),
    detector("faster_rcnn", 50, "plain", 41.53),
    detector("faster_rcnn", 50, "base", 41.70),
    detector("faster_rcnn", 50, "light", 41.70),
    detector("faster_rcnn", 101, "plain", 60.52),
    detector("faster_rcnn", 101, "light", 60.90),
    detector("retinanet", 50, "plain", 37.74),
    detector("retinanet", 50, "base", 37.92),
    detector("retinanet", 50, "light", 37.92),
    detector("retinanet", 101, "plain", 56.74),
    detector("retinanet", 101, "light", 57.12),
    detector("mask_rcnn", 50, "plain", 44.18, 275.58),
    detector("mask_rcnn", 50, "base", 44.34, 289.49),
    detector("mask_rcnn", 50, "light", 44.34, 276.93),
    detector("mask_rcnn", 101, "plain", 63.17, 351.65),
    detector("mask_rcnn", 101, "light", 63.54, 353.84),
    resnet(50, "MLA", 25.7, 4.8, "B.2"),
    resnet(101, "MLA", 44.9, 9.1, "B.2"),
    resnet(101, "base", 44.9, 8.5, "B.2"),
)

NOTES = """\
"over plain" is the difference to the plain model above, which the choice of what else to count leaves alone.

* Base and MLA. The paper gives Mask R-CNN R50 + base +13.91 G over plain. By the rule above it is about a tenth of
  that: the depthwise convolutions are those of light (+1.01), the weighted sums over layers read t values at layer
  t, T (T + 1) / 2 in a stage of T layers (+0.28, or +0.56 if product and sum count apart: about +1.7 in all), and
  batch norm +0.11. Even MLA, which makes every value anew at every layer, stays near +3. No rule was looked for
  that gives the paper's figure; the same holds for its +0.5 B (base) and +0.7 B (MLA) on ResNet-50 at 224 x 224.
* Totals of detectors. The mask head's transposed convolution does 5.1 G multiply-adds; counted at each element of
  its output it would be 20.6 G, 15.4 G more, which is most of what the paper's totals exceed ours by.
* PVTv2. mmdet's PVTv2 with a 1000-class head has more parameters than the paper says; without the head B0 has 3.41 M.
"""


def compare(row: PaperRow, found: Complexity, plain: Complexity | None) -> dict[str, str]:
    """Line of the table: what was counted, the paper's figure, and the difference; for `as_markdown`.

    Args:
        row: the paper's.
        found: what was counted for its config.
        plain: what was counted for the plain model of the same row, or None for itself.
    """
    parameters = (found.trainable if row.is_detector else found.total_parameters) / 1e6
    operations = found.total / 1e9
    digits = 2 if row.is_detector else 1
    cells = {
        "table": row.table,
        "model": row.model,
        "M parameters": f"{parameters:.2f}",
        "paper's": f"{row.parameters:.{digits}f}",
        "difference": f"{parameters - row.parameters:+.2f}",
        "G multiply-adds": f"{operations:.3f}",
        "paper's FLOPs [G]": "" if row.operations is None else f"{row.operations:.{digits}f}",
        "difference [G]": "" if row.operations is None else f"{operations - row.operations:+.2f}",
    }
    if plain is not None:
        cells["over plain [G]"] = f"{(found.total - plain.total) / 1e9:+.3f}"
        cells["paper's over plain"] = paper_difference(row)
    return cells


def plain_row(row: PaperRow, rows: Sequence[PaperRow] = ROWS) -> PaperRow | None:
    """Row of the plain model that a row's model adds layer attention to, or None for a plain model."""
    name, plus, _ = row.model.partition(" + ")
    return next(other for other in rows if other.model == name and other.shape == row.shape) if plus else None


def paper_difference(row: PaperRow) -> str:
    """What layer attention adds according to the paper, where it gives both figures."""
    plain = plain_row(row)
    if plain is None or row.operations is None or plain.operations is None:
        return ""
    return f"{row.operations - plain.operations:+.{2 if row.is_detector else 1}f}"
