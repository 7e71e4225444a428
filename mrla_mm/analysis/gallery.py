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
    """mmdet's visualizer with legible names: its own halves their size for smaller boxes."""

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
        min_side: enlarge the image by the smallest integer that brings its longer side there.
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
    with warnings.catch_warnings():  # objects may reach beyond the picture
        warnings.filterwarnings("ignore", message=".*out of bounds")
        visualizer.add_datasample(
            "", canvas, DetDataSample(gt_instances=instances), draw_pred=False
        )
    return visualizer.get_image()


def compare(image: np.ndarray, sample: DetDataSample, **options: object) -> np.ndarray:
    """Draw ground truth (left) and prediction (right) of an image, each under its title.

    `sample` has `gt_instances` and `pred_instances`; options are those of `draw_detections`.
    """
    truth = framed(draw_detections(image, sample.gt_instances, **options), top=28)
    found = framed(draw_detections(image, sample.pred_instances, **options), top=28, left=GAP)
    font = dict(fontFace=cv2.FONT_HERSHEY_SIMPLEX, fontScale=0.6, color=(30, 30, 30))
    cv2.putText(truth, "ground truth", (6, 20), lineType=cv2.LINE_AA, **font)
    cv2.putText(found, "prediction", (GAP + 6, 20), lineType=cv2.LINE_AA, **font)
    return np.concatenate([truth, found], 1)


def framed(
    picture: np.ndarray, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0
) -> np.ndarray:
    """Return a picture (H, W, 3) with white margins."""
    margins = ((top, bottom), (left, right), (0, 0))
    return np.pad(picture, margins, constant_values=255)


def predict_and_compare(
    model: nn.Module, dataset, indices: Iterable[int], score_thr: float = 0.3
) -> Iterator[tuple[str, np.ndarray]]:
    """Predict images of a data set; yield their file names and pictures beside the ground truth.

    The model has its config as `cfg`; the data set's pipeline loads annotations after it resizes,
    as mmdet's do.
    """
    for index in indices:
        sample = dataset[index]["data_samples"]
        sample.pred_instances = inference_detector(model, sample.img_path).pred_instances.cpu()
        image = mmcv.imread(sample.img_path, channel_order="rgb")
        picture = compare(image, sample, meta=dataset.metainfo, score_thr=score_thr)
        yield Path(sample.img_path).name, picture


def contact_sheet(
    pictures: Sequence[np.ndarray], *, columns: int = 2, width: int = 800
) -> np.ndarray:
    """Put pictures (H, W, 3) on a white sheet, row by row, each scaled to one width in pixels."""
    tiles = []
    for picture in pictures:
        height = round(len(picture) * width / picture.shape[1])
        tiles.append(mmcv.imresize(picture, (width, height)))
    highest = max(map(len, tiles))
    tiles = [framed(tile, GAP, GAP + highest - len(tile), GAP, GAP) for tile in tiles]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    starts = range(0, len(tiles), columns)
    return np.concatenate([np.concatenate(tiles[at : at + columns], 1) for at in starts])
