#!/usr/bin/env python
"""Draw what the detectors of evidence.py learnt: detections, layer-attention maps and lambda, seed by seed.

`python .dev_scripts/look_inside.py --data-root bccd` runs the checkpoints that evidence.py left over the test images,
prints the tables of docs/analysis.md and writes detections.jpg, layer_attention.png and inside.svg of docs/_static.
"""

import itertools
import sys

import cv2
import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from mmdet.apis import inference_detector
from mmdet.registry import VISUALIZERS
from mmengine.runner import find_latest_checkpoint

import evidence
from measure import as_markdown
from mrla_mm import cli, inference
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder

SHOWN = 2  # the stage drawn seed by seed: the third, of six layers
SEED = 0  # whose detections and maps the README shows


def load(kind, seed, args):
    """Return a detector with its config."""
    folder = args.out / f"{kind}_{seed}"
    (config,) = folder.glob("*.py")
    return inference.load_model(str(config), find_latest_checkpoint(folder), device="cpu")


def record(trained, images):
    """Return a (T, T) map for each stage, the mean over heads and images."""
    loaded = inference.LoadedModel("", trained.model, (), inference.get_test_pipeline(trained.cfg))
    with torch.no_grad(), LayerAttentionRecorder(trained.model) as recorder:
        for path in images:
            trained.model.extract_feat(loaded.prepare(path).inputs)
    return [stage.weights.numpy().mean(0) for stage in recorder.stages()]


def draw_map(axes, weights, title, largest):
    """Draw a (T, T) map with its numbers."""
    axes.imshow(np.ma.masked_invalid(weights), cmap="RdBu_r", vmin=-largest, vmax=largest)
    for row, column in np.argwhere(np.isfinite(weights)):
        color = "white" if abs(weights[row, column]) > 0.6 * largest else "black"
        axes.text(column, row, f"{weights[row, column]:.2f}", ha="center", va="center", fontsize=5.5, color=color)
    axes.set_xticks(range(len(weights)), range(1, len(weights) + 1), fontsize=6)
    axes.set_yticks(range(len(weights)), range(1, len(weights) + 1), fontsize=6)
    axes.set_title(title, fontsize=8)


def draw_detections(trained, images, file):
    """Draw what a detector finds, image beside image."""
    drawn = []
    for path in images:
        drawer = VISUALIZERS.build(dict(type="DetLocalVisualizer"))
        drawer.dataset_meta = dict(classes=evidence.CLASSES, palette=[(214, 39, 40), (31, 119, 180), (44, 160, 44)])
        image = cv2.imread(str(path))[..., ::-1]
        drawer.add_datasample("", image, inference_detector(trained.model, str(path)), draw_gt=False, pred_score_thr=0.5)
        drawn.append(cv2.resize(drawer.get_image(), (400, 300), interpolation=cv2.INTER_AREA))
    cv2.imwrite(str(file), np.hstack(drawn)[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])
