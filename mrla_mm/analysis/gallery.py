"""Pictures of detections: what a model finds, beside the ground truth."""

import warnings
from collections.abc import Iterable, Iterator
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
        min_side: the image is enlarged by the smallest integer factor that brings its longer side there.
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
        warnings.filterwarnings("ignore", message=".*out of bounds")  # objects may reach beyond the picture
        visualizer.add_datasample("", canvas, DetDataSample(gt_instances=instances), draw_pred=False)
    return visualizer.get_image()


def compare(image: np.ndarray, sample: DetDataSample, **options: object) -> np.ndarray:
    """Draw ground truth (left) and prediction (right) of an image, each under its title.

    `sample` has `gt_instances` and `pred_instances`; options are those of `draw_detections`.
    """
    sides = []
    for title, instances in (("ground truth", sample.gt_instances), ("prediction", sample.pred_instances)):
        picture = draw_detections(image, instances, **options)
        strip = np.full((28, picture.shape[1], 3), 255, np.uint8)
        cv2.putText(strip, title, (6, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (30, 30, 30), 1, cv2.LINE_AA)
        sides.append(np.concatenate([strip, picture]))
    gap = np.full((len(sides[0]), GAP, 3), 255, np.uint8)
    return np.concatenate([sides[0], gap, sides[1]], 1)


def predict_and_compare(
    model: nn.Module, dataset, indices: Iterable[int], score_thr: float = 0.3
) -> Iterator[tuple[str, np.ndarray]]:
    """Predict images of a data set; yield each one's file name and its picture beside the ground truth.

    Args:
        model: detector with its config as `cfg`, as `mmdet.apis.init_detector` returns it.
        dataset: mmdet data set whose pipeline loads annotations after it resizes, as mmdet's test pipelines do.
        indices: which images.
        score_thr: predictions below it are left out.
    """
    for index in indices:
        sample = dataset[index]["data_samples"]
        sample.pred_instances = inference_detector(model, sample.img_path).pred_instances.cpu()
        image = mmcv.imread(sample.img_path, channel_order="rgb")
        yield Path(sample.img_path).name, compare(image, sample, meta=dataset.metainfo, score_thr=score_thr)


def write_gallery(
    model: nn.Module, dataset, out_dir: str | Path, *, indices: Iterable[int], score_thr: float = 0.3
) -> list[Path]:
    """Write the pictures of `predict_and_compare` as <image name>.png; return their files."""
    written = []
    for name, picture in predict_and_compare(model, dataset, indices, score_thr):
        written.append(Path(out_dir) / f"{Path(name).stem}.png")
        mmcv.imwrite(picture[..., ::-1], str(written[-1]))
    return written


def contact_sheet(pictures: Iterable[str | Path], out_file: str | Path, *, columns: int = 2, width: int = 800) -> Path:
    """Put pictures on one sheet, row by row, each scaled to the same width in pixels."""
    tiles = [mmcv.imread(str(path)) for path in pictures]
    tiles = [mmcv.imresize(tile, (width, round(len(tile) * width / tile.shape[1]))) for tile in tiles]
    bands = []
    for start in range(0, len(tiles), columns):
        row = tiles[start : start + columns]
        band = np.full((max(map(len, row)) + 2 * GAP, columns * (width + 2 * GAP), 3), 255, np.uint8)
        for column, tile in enumerate(row):
            left = column * (width + 2 * GAP) + GAP
            band[GAP : GAP + len(tile), left : left + width] = tile
        bands.append(band)
    mmcv.imwrite(np.concatenate(bands), str(out_file))
    return Path(out_file)
