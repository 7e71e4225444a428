"""Pictures of detections: what a model finds, beside the ground truth."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import cv2
import mmcv
import numpy as np
from mmdet.apis import inference_detector
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
from torch import nn

MIN_SIDE = 512
GAP = 8


class LegibleVisualizer(DetLocalVisualizer):
    """mmdet's visualizer with legible names: its own halves their size for all but the largest boxes."""

    def draw_texts(self, texts, positions, *, font_sizes, **kwargs):
        """Draw texts no smaller than 11 points; arguments of mmengine's visualizer."""
        return super().draw_texts(texts, positions, font_sizes=max(font_sizes, 11), **kwargs)


def draw_detections(
    image: np.ndarray, instances, *, meta: dict, score_thr: float = 0.3, min_side: int = MIN_SIDE
) -> np.ndarray:
    """Draw boxes, masks, class names and scores (in percent) onto an image.

    Args:
        image: (H, W, 3) uint8, RGB.
        instances: mmdet's ground truth or predictions in pixels of the image.
        meta: "classes" and "palette" of the data set.
        score_thr: predictions below it are left out.
        min_side: the image is enlarged by the smallest integer factor that brings its longer side
            there.
    """
    factor = max(1, -(-min_side // max(image.shape[:2])))
    if "scores" in instances:
        instances = instances[instances.scores >= score_thr]
    canvas = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    if len(instances) == 0:
        return canvas
    instances = instances.cpu().clone()
    boxes = instances.bboxes
    instances.bboxes = (boxes.tensor if hasattr(boxes, "tensor") else boxes) * factor
    if "masks" in instances:
        masks = instances.masks
        masks = masks.to_ndarray() if hasattr(masks, "to_ndarray") else masks.numpy()
        instances.masks = masks.astype(bool).repeat(factor, 1).repeat(factor, 2)
    visualizer = LegibleVisualizer(line_width=2, alpha=0.5, text_color=(255, 255, 255))
    visualizer.dataset_meta = meta
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*out of bounds"
        )  # objects may reach beyond the picture
        visualizer.add_datasample(
            "", canvas, DetDataSample(gt_instances=instances), draw_pred=False
        )
    return visualizer.get_image()


def compare(image: np.ndarray, sample: DetDataSample, **options: object) -> np.ndarray:
    """Draw ground truth (left) and prediction (right) of an image, each under its title.

    `sample` has `gt_instances` and `pred_instances`; options are those of `draw_detections`.
    """
    sides = []
    for gap, title, instances in (
        (0, "ground truth", sample.gt_instances),
        (GAP, "prediction", sample.pred_instances),
    ):
        sides.append(framed(draw_detections(image, instances, **options), top=28, left=gap))
        cv2.putText(
            sides[-1],
            title,
            (gap + 6, 20),
            cv2.FONT_HERSHEY_SIMPLEX,
            0.6,
            (30, 30, 30),
            1,
            cv2.LINE_AA,
        )
    return np.concatenate(sides, 1)


def framed(
    picture: np.ndarray, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0
) -> np.ndarray:
    """Return a picture (H, W, 3) with white margins."""
    return cv2.copyMakeBorder(
        picture, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )


def predict_and_compare(
    model: nn.Module, dataset, indices: Iterable[int], score_thr: float = 0.3
) -> Iterator[tuple[str, np.ndarray]]:
    """Predict images of a data set; yield each one's file name and its picture beside the ground truth.

    The model has its config as `cfg`; the data set's pipeline loads annotations after it resizes,
    as mmdet's do.
    """
    for index in indices:
        sample = dataset[index]["data_samples"]
        sample.pred_instances = inference_detector(model, sample.img_path).pred_instances.cpu()
        image = mmcv.imread(sample.img_path, channel_order="rgb")
        yield (
            Path(sample.img_path).name,
            compare(image, sample, meta=dataset.metainfo, score_thr=score_thr),
        )


def contact_sheet(
    pictures: Sequence[np.ndarray], *, columns: int = 2, width: int = 800
) -> np.ndarray:
    """Put pictures (H, W, 3) on one white sheet, row by row, each scaled to the same width in pixels."""
    tiles = [
        mmcv.imresize(picture, (width, round(len(picture) * width / picture.shape[1])))
        for picture in pictures
    ]
    height = max(map(len, tiles))
    tiles = [framed(tile, GAP, GAP + height - len(tile), GAP, GAP) for tile in tiles]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    return np.concatenate(
        [np.concatenate(tiles[at : at + columns], 1) for at in range(0, len(tiles), columns)]
    )
