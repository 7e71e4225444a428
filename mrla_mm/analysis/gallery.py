"""Pictures of detections: what a model finds, beside the ground truth."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import cv2
import mmcv
import numpy as np
from mmdet.apis import inference_detector
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
from torch import nn

MIN_SIDE = 512  # smaller pictures are enlarged by a whole factor, so that names and scores can be read
MIN_FONT = 11
_GAP = 8


class LegibleVisualizer(DetLocalVisualizer):
    """mmdet's visualizer with names of one size: its own halves them for all but the largest boxes."""

    def draw_texts(self, texts, positions, *, font_sizes, **kwargs):
        """Draw texts no smaller than `MIN_FONT`; arguments of mmengine's visualizer."""
        return super().draw_texts(texts, positions, font_sizes=max(font_sizes, MIN_FONT), **kwargs)


def draw_detections(
    image: np.ndarray, instances, *, meta: dict, score_thr: float = 0.3, min_side: int = MIN_SIDE
) -> np.ndarray:
    """Draw boxes, masks, class names and scores (in percent) onto an image.

    Args:
        image: (H, W, 3) uint8, RGB.
        instances: mmdet's ground truth or predictions in pixels of the image.
        meta: "classes" and "palette" of the data set.
        score_thr: Predictions below it are left out.
        min_side: The image is enlarged by the smallest whole factor that brings its longer side there.

    Returns:
        np.ndarray: (s H, s W, 3) uint8, RGB, s the whole factor.
    """
    factor = max(1, -(-min_side // max(image.shape[:2])))
    if "scores" in instances:
        instances = instances[instances.scores >= score_thr]
    instances = _enlarge(instances.cpu(), factor)
    canvas = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    if len(instances) == 0:
        return canvas
    visualizer = LegibleVisualizer(line_width=2, alpha=0.5, text_color=(255, 255, 255))
    visualizer.dataset_meta = meta
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*out of bounds")  # objects may reach beyond the picture
        visualizer.add_datasample("", canvas, DetDataSample(gt_instances=instances), draw_pred=False)
    return visualizer.get_image()


def compare(
    image: np.ndarray, sample: DetDataSample, *, meta: dict, score_thr: float = 0.3, min_side: int = MIN_SIDE
) -> np.ndarray:
    """Ground truth (left) beside prediction (right), each under its title.

    Args:
        image: (H, W, 3) uint8, RGB.
        sample: With `gt_instances` and `pred_instances` in pixels of the image.
        meta: "classes" and "palette" of the data set.
        score_thr: Predictions below it are left out.
        min_side: See `draw_detections`.

    Returns:
        np.ndarray: (H', W', 3) uint8, RGB.
    """
    sides = [
        _titled(draw_detections(image, instances, meta=meta, score_thr=score_thr, min_side=min_side), title)
        for title, instances in (("ground truth", sample.gt_instances), ("prediction", sample.pred_instances))
    ]
    gap = np.full((sides[0].shape[0], _GAP, 3), 255, np.uint8)
    return np.concatenate([sides[0], gap, sides[1]], 1)


def write_gallery(
    model: nn.Module, dataset, out_dir: str | Path, *, indices: Iterable[int], score_thr: float = 0.3
) -> list[Path]:
    """Predict images of a data set and write each beside its ground truth, as <image name>.png.

    Args:
        model: From `mmdet.apis.init_detector`.
        dataset: mmdet data set whose pipeline loads annotations after it resizes, as mmdet's test pipelines do.
        out_dir: Folder, made when it is missing.
        indices: Which images.
        score_thr: Predictions below it are left out.

    Returns:
        list[Path]: The pictures.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for index in indices:
        truth = dataset[index]["data_samples"]
        image = mmcv.imread(truth.img_path, channel_order="rgb")
        predicted = inference_detector(model, truth.img_path)
        truth.pred_instances = predicted.pred_instances.cpu()
        path = out_dir / f"{Path(truth.img_path).stem}.png"
        picture = compare(image, truth, meta=dataset.metainfo, score_thr=score_thr)
        mmcv.imwrite(picture[..., ::-1], str(path))
        written.append(path)
    return written


def contact_sheet(pictures: Iterable[str | Path], out_file: str | Path, *, columns: int = 2, width: int = 800) -> Path:
    """Put pictures on one sheet, row by row, each scaled to the same width.

    Args:
        pictures: Files, at least one.
        out_file: Picture to write.
        columns: Pictures in a row.
        width: Of each picture, in pixels.

    Returns:
        Path: `out_file`.
    """
    tiles = []
    for path in pictures:
        tile = mmcv.imread(str(path))
        height = round(tile.shape[0] * width / tile.shape[1])
        tiles.append(cv2.resize(tile, (width, height), interpolation=cv2.INTER_AREA))
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    bands = []
    for row in rows:
        height = max(tile.shape[0] for tile in row) + 2 * _GAP
        band = np.full((height, columns * (width + 2 * _GAP), 3), 255, np.uint8)
        for column, tile in enumerate(row):
            left = column * (width + 2 * _GAP) + _GAP
            band[_GAP : _GAP + tile.shape[0], left : left + width] = tile
        bands.append(band)
    mmcv.imwrite(np.concatenate(bands), str(out_file))
    return Path(out_file)


def _enlarge(instances, factor: int):
    """Copy of the instances in the pixels of an image enlarged by a whole factor."""
    instances = instances.clone()
    boxes = instances.bboxes
    instances.bboxes = (boxes.tensor if hasattr(boxes, "tensor") else boxes) * factor
    if "masks" in instances:
        masks = instances.masks
        masks = masks.to_ndarray() if hasattr(masks, "to_ndarray") else masks.numpy()
        instances.masks = masks.astype(bool).repeat(factor, 1).repeat(factor, 2)
    return instances


def _titled(picture: np.ndarray, title: str) -> np.ndarray:
    strip = np.full((28, picture.shape[1], 3), 255, np.uint8)
    cv2.putText(strip, title, (6, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (30, 30, 30), 1, cv2.LINE_AA)
    return np.concatenate([strip, picture])
