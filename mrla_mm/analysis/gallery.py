"""Pictures of detections: what a model finds, beside the ground truth."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import cv2
import mmcv
import numpy as np
from mmdet.apis import inference_detector
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import get_box_tensor
from mmdet.visualization import DetLocalVisualizer
from torch import nn

MIN_SIDE = 512
GAP = 8


class LegibleVisualizer(DetLocalVisualizer):
    """mmdet's visualizer with legible names: its own halves their size for smaller boxes."""

    def draw_texts(self, texts, positions, *, font_sizes, **kwargs):
        """Draw texts no smaller than 11 points; arguments of mmengine's visualizer."""
        return super().draw_texts(texts, positions, font_sizes=max(font_sizes, 11), **kwargs)


def compare(
    image: np.ndarray, sample: DetDataSample, meta: Mapping, score_thr: float = 0.3
) -> np.ndarray:
    """Draw ground truth (left) and predictions (right) onto an image (H, W, 3), uint8 and RGB.

    `meta` has the "classes" and "palette" of the data set. A small image is enlarged by an integer,
    so that names fit beside its objects.
    """
    factor = max(1, -(-MIN_SIDE // max(image.shape[:2])))
    sample = sample.cpu()  # a copy, instances too
    for instances in (sample.gt_instances, sample.pred_instances):
        instances.bboxes = get_box_tensor(instances.bboxes) * factor
        if "masks" in instances:
            masks = instances.masks
            masks = masks.to_ndarray() if hasattr(masks, "to_ndarray") else masks.numpy()
            instances.masks = masks.repeat(factor, 1).repeat(factor, 2)
    canvas = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    visualizer = LegibleVisualizer(line_width=2, alpha=0.5, text_color=(255, 255, 255))
    visualizer.dataset_meta = meta
    with warnings.catch_warnings():  # objects may reach beyond the picture
        warnings.filterwarnings("ignore", message=".*out of bounds")
        visualizer.add_datasample("", canvas, sample, pred_score_thr=score_thr)
    return visualizer.get_image()


def predict_and_compare(
    model: nn.Module, dataset, indices: Iterable[int], score_thr: float = 0.3
) -> Iterator[np.ndarray]:
    """Predict images of a data set; yield their pictures beside the ground truth.

    The model has its config as `cfg`; the data set's pipeline loads annotations after it resizes,
    as mmdet's do.
    """
    for index in indices:
        sample = dataset[index]["data_samples"]
        sample.pred_instances = inference_detector(model, sample.img_path).pred_instances.cpu()
        image = mmcv.imread(sample.img_path, channel_order="rgb")
        yield compare(image, sample, dataset.metainfo, score_thr)


def contact_sheet(
    pictures: Sequence[np.ndarray], *, columns: int = 2, width: int = 800
) -> np.ndarray:
    """Put pictures (H, W, 3) on a white sheet, row by row, each scaled to one width in pixels."""
    tiles = []
    for picture in pictures:
        height = round(len(picture) * width / picture.shape[1])
        tiles.append(mmcv.imresize(picture, (width, height)))
    pitch = max(map(len, tiles)) + GAP
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * pitch, columns * (width + GAP), 3), 255, np.uint8)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        top, left = row * pitch, column * (width + GAP)
        sheet[top : top + len(tile), left : left + width] = tile
    return sheet
