"""The models of the paper's tables, its own and the plain baselines, with the configs that train them.

Source: Tables 1 to 12 of "Cross-Layer Retrospective Retrieving via Layer Attention", ICLR 2023. All figures are the
paper's: millions of parameters, billions of FLOPs (multiply-adds), percent, and MiB of memory for each GPU. Rows about
other methods (SE, ECA, BA-Net, ...) are left out. Detectors get images of 1280 x 800, and their parameters leave out
the frozen stem and first stage, which is how the paper's totals come out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

DETECTION_SHAPE = (800, 1280)
TOP = ("accuracy/top1", "accuracy/top5")
BOX = tuple(f"coco/bbox_mAP{suffix}" for suffix in ("", "_50", "_75", "_s", "_m", "_l"))
MASK = tuple(f"coco/segm_mAP{suffix}" for suffix in ("", "_50", "_75", "_s", "_m", "_l"))
MEMORY = ("memory",)


class PaperRow(NamedTuple):
    """A model of the paper's tables and the config that trains it.

    Attributes:
        model: in the paper's words; no two rows share it.
        config: name below configs/, without its suffix.
        parameters: the paper's, in millions; None where no table says.
        operations: the paper's, in billions; None where no table says.
        shape: (height, width) of the image.
        options: overrides of the config, for a model that has none of its own.
        figures: the paper's, by the names under which a run logs its own; percent, MiB, or None for "out of memory".
    """

    model: str
    config: str
    parameters: float | None
    operations: float | None
    shape: tuple[int, int] = (224, 224)
    options: Mapping[str, object] = {}
    figures: Mapping[str, float | None] = {}

    @property
    def is_detector(self) -> bool:
        """Whether the row is about a detector."""
        return self.shape == DETECTION_SHAPE


def resnet(
    depth: int, variant: str, parameters: float, operations: float, *top: float, memory: float | None = 0
) -> PaperRow:
    """Row of a classifier on ResNet; a depth without a plain or MLA config of its own takes ResNet-50's."""
    suffix = {"plain": "", "light": "_mrla_light", "base": "_mrla_base", "MLA": "_mla"}[variant]
    own = depth == 50 or suffix.startswith("_mrla")
    config = f"imagenet/resnet{depth if own else 50}{suffix}_8xb32"
    options = {} if own else {"model.backbone.depth": depth}
    name = f"ResNet-{depth}" + ("" if variant == "plain" else f" + {variant}")
    figures = dict(zip(TOP, top, strict=False)) | ({} if memory == 0 else {"memory": memory})
    return PaperRow(name, config, parameters, operations, options=options, figures=figures)


def ablation(name: str, parameters: float, operations: float, top1: float, options: Mapping[str, object]) -> PaperRow:
    """Row of ResNet-50 with MRLA-light changed in one way."""
    options = {f"model.{key}": value for key, value in options.items()}
    figures = {"accuracy/top1": top1}
    return PaperRow(
        f"ResNet-50 + {name}",
        "imagenet/resnet50_mrla_light_8xb32",
        parameters,
        operations,
        options=options,
        figures=figures,
    )


def detector(
    head: str,
    depth: int,
    variant: str,
    parameters: float,
    box: Sequence[float],
    mask: Sequence[float] = (),
    operations: float | None = None,
) -> PaperRow:
    """Row of a detector on ResNet."""
    name = {"retinanet": "RetinaNet", "faster_rcnn": "Faster R-CNN", "mask_rcnn": "Mask R-CNN"}[head]
    suffix = "" if variant == "plain" else f"_mrla_{variant}"
    model = f"{name} R{depth}" + ("" if variant == "plain" else f" + {variant}")
    figures = dict(zip(BOX, box, strict=False)) | dict(zip(MASK, mask, strict=False))
    return PaperRow(model, f"{head}_r{depth}{suffix}_1x", parameters, operations, DETECTION_SHAPE, figures=figures)


def family(
    name: str,
    stem: str,
    batch: int,
    rows: Sequence[tuple],
    size: int = 224,
    options: Mapping[str, object] | None = None,
) -> Iterator[PaperRow]:
    """Rows of a classifier of another family, by (variant, parameters, operations, top-1, top-5 if stated)."""
    for variant, parameters, operations, *top in rows:
        suffix = "" if variant == "plain" else f"_mrla_{variant}"
        label = name + (f" at {size}" if size != 224 else "") + ("" if variant == "plain" else f" + {variant}")
        config, figures = f"imagenet/{stem}{suffix}_8xb{batch}", dict(zip(TOP, top, strict=False))
        yield PaperRow(label, config, parameters, operations, (size, size), options or {}, figures)


# Where no table says how CeiT was trained at 384 x 384: the recipe of 224, with CeiT's ratio of edge and crop.
AT_384 = {
    "model.backbone.img_size": 384,
    "train_dataloader.dataset.pipeline.1.scale": 384,
    **{f"{phase}_dataloader.dataset.pipeline.1.scale": 438 for phase in ("val", "test")},
    **{f"{phase}_dataloader.dataset.pipeline.2.crop_size": 384 for phase in ("val", "test")},
}
ATTENTION = "backbone.layer_attention"
CONVOLUTION_ALONE = {f"{ATTENTION}.gated": False, f"{ATTENTION}.previous": "none"}
MIXUP_AND_SMOOTHING = {
    "backbone.attention_drop_path": 0.0,
    "train_cfg.augments.type": "Mixup",
    "train_cfg.augments.alpha": 0.2,
    "head.loss.type": "LabelSmoothLoss",
    "head.loss.label_smooth_val": 0.1,
}

ROWS: tuple[PaperRow, ...] = (
    resnet(50, "plain", 25.6, 4.1, 76.1, 92.9),
    resnet(50, "base", 25.7, 4.6, 77.7, 93.9, memory=13_800),
    resnet(50, "light", 25.7, 4.2, 77.7, 93.8, memory=12_200),
    resnet(101, "plain", 44.5, 7.8, 77.4, 93.5),
    resnet(101, "light", 44.9, 7.9, 78.7, 94.4, memory=17_700),
    resnet(152, "plain", 60.2, 11.6, 78.3, 94.0),
    resnet(152, "light", 60.7, 11.7, 79.1, 94.6),
    *family(
        "EfficientNet-B0",
        "efficientnet_b0",
        96,
        [
            ("plain", 5.3, 0.4, 77.1, 93.3),
            ("base", 5.3, 0.6, 78.3, 94.1),
            ("light", 5.3, 0.5, 78.4, 94.1),
        ],
    ),
    *family(
        "EfficientNet-B1",
        "efficientnet_b1",
        96,
        [
            ("plain", 7.8, 0.7, 79.1, 94.4),
            ("base", 7.8, 0.9, 80.2, 95.3),
            ("light", 7.8, 0.8, 80.2, 95.2),
        ],
        size=240,
    ),
    *family(
        "DeiT-T",
        "deit_tiny",
        128,
        [
            ("plain", 5.7, 1.2, 72.2, 91.1),
            ("base", 5.7, 1.4, 73.5, 92.0),
            ("light", 5.7, 1.2, 73.4, 91.9),
        ],
    ),
    *family("DeiT-S", "deit_small", 128, [("plain", 22.1, 4.5, 79.9, 95.0), ("light", 22.1, 4.6, 81.3, 95.9)]),
    *family("DeiT-B", "deit_base", 128, [("plain", 86.4, 16.8, 81.8, 95.6), ("light", 86.5, 16.9, 82.9, 96.3)]),
    *family("CeiT-T", "ceit_tiny", 128, [("plain", 6.4, 1.4, 76.4, 93.4), ("light", 6.4, 1.4, 77.4, 94.1)]),
    *family(
        "CeiT-T",
        "ceit_tiny",
        128,
        [
            ("plain", 6.4, 5.1, 78.8, 94.7),
            ("light", 6.4, 5.1, 79.6, 95.1),
        ],
        size=384,
        options=AT_384,
    ),
    *family("CeiT-S", "ceit_small", 128, [("plain", 24.2, 4.8, 82.0, 95.9), ("light", 24.3, 4.9, 83.2, 96.6)]),
    *family(
        "PVTv2-B0",
        "pvtv2_b0",
        128,
        [
            ("plain", 3.4, 0.6, 70.5),
            ("base", 3.4, 0.9, 71.4, 90.7),
            ("light", 3.4, 0.7, 71.5, 90.7),
        ],
    ),
    *family("PVTv2-B1", "pvtv2_b1", 128, [("plain", 13.1, 2.3, 78.7), ("light", 13.2, 2.4, 79.4, 94.9)]),
    detector("faster_rcnn", 50, "plain", 41.53, (36.4, 58.2, 39.2, 21.8, 40.0, 46.2)),
    detector("faster_rcnn", 50, "base", 41.70, (40.1, 61.3, 43.8, 24.0, 43.9, 52.4)),
    detector("faster_rcnn", 50, "light", 41.70, (40.4, 61.5, 44.0, 24.2, 44.1, 52.7)),
    detector("faster_rcnn", 101, "plain", 60.52, (38.7, 60.6, 41.9, 22.7, 43.2, 50.4)),
    detector("faster_rcnn", 101, "light", 60.90, (42.0, 63.1, 45.7, 25.0, 45.8, 55.4)),
    detector("retinanet", 50, "plain", 37.74, (35.6, 55.5, 38.2, 20.0, 39.6, 46.8)),
    detector("retinanet", 50, "base", 37.92, (39.3, 59.3, 42.1, 24.0, 43.3, 50.8)),
    detector("retinanet", 50, "light", 37.92, (39.6, 59.7, 42.4, 24.1, 43.6, 51.2)),
    detector("retinanet", 101, "plain", 56.74, (37.7, 57.5, 40.4, 21.1, 42.2, 49.5), operations=315),
    detector("retinanet", 101, "light", 57.12, (41.3, 61.4, 44.2, 24.8, 45.6, 53.8), operations=318),
    detector(
        "mask_rcnn",
        50,
        "plain",
        44.18,
        (37.2, 58.9, 40.3, 22.2, 40.7, 48.0),
        (34.1, 55.5, 36.2, 16.1, 36.7, 50.0),
        275.58,
    ),
    detector("mask_rcnn", 50, "base", 44.34, (40.9, 62.1, 44.8), (36.9, 58.8, 39.3), 289.49),
    detector(
        "mask_rcnn",
        50,
        "light",
        44.34,
        (41.2, 62.3, 45.1, 24.8, 44.6, 53.5),
        (37.1, 59.1, 39.6, 19.5, 40.3, 52.0),
        276.93,
    ),
    detector(
        "mask_rcnn",
        101,
        "plain",
        63.17,
        (39.4, 60.9, 43.3, 23.0, 43.7, 51.4),
        (35.9, 57.7, 38.4, 16.8, 39.1, 53.6),
        351.65,
    ),
    detector(
        "mask_rcnn",
        101,
        "light",
        63.54,
        (42.8, 63.6, 46.5, 25.5, 46.7, 55.2),
        (38.4, 60.6, 41.0, 20.4, 41.7, 54.8),
        353.84,
    ),
    resnet(50, "MLA", 25.7, 4.8, 77.6, memory=18_200),
    ablation("light (b) without history", 25.7, 4.2, 77.0, {f"{ATTENTION}.previous": "none"}),
    ablation("light (c) without DWConv2d", 25.6, 4.1, 77.4, {f"{ATTENTION}.value": "identity"}),
    ablation("light (d) with FC", 28.2, 4.2, 77.5, {f"{ATTENTION}.projection": "linear", f"{ATTENTION}.reduction": 16}),
    ablation("light (e) lambda = 1", 25.7, 4.2, 77.1, {f"{ATTENTION}.learnable_lambda": False}),
    *(
        ablation(f"light (f) d_k = {width}", 25.7, 4.2, top1, {f"{ATTENTION}.head_channels": width})
        for width, top1 in ((16, 77.5), (64, 77.3), (1, 77.2))
    ),
    ablation("DWConv2d", 25.7, 4.2, 76.6, CONVOLUTION_ALONE | {"backbone.attention_drop_path": 0.0}),
    ablation("DWConv2d with stochastic depth", 25.7, 4.2, 76.9, CONVOLUTION_ALONE),
    ablation("light (M, LS)", 25.7, 4.2, 77.9, MIXUP_AND_SMOOTHING),
    PaperRow(
        "ResNet-50 + light, BA-Net's recipe",
        "imagenet/resnet50_mrla_light_coslr_lbs_8xb32",
        25.7,
        4.2,
        figures=dict(zip(TOP, (78.7, 94.4), strict=True)),
    ),
    resnet(101, "MLA", 44.9, 9.1, memory=None),
    resnet(101, "base", 44.9, 8.5, memory=None),
    PaperRow(
        "DeiT-T + DWConv",
        "imagenet/deit_tiny_mrla_light_8xb128",
        None,
        None,
        options={f"model.{key}": value for key, value in CONVOLUTION_ALONE.items()},
        figures=dict(zip(TOP, (72.8, 91.7), strict=True)),
    ),
)
