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

KINDS = ("MRLA-base", "MRLA-light")
STAGE = 2  # drawn seed by seed: the third, of six layers


def load(kind, seed, args):
    """Return a detector and its config."""
    folder = args.out / f"{kind}_{seed}"
    (config,) = folder.glob("*.py")
    return inference.load_model(str(config), find_latest_checkpoint(folder), device="cpu")


def record(trained, images):
    """Return a (T, T) map for each stage, the mean over heads and images."""
    pipeline = inference.get_test_pipeline(trained.cfg)
    loaded = inference.LoadedModel("", trained.model, (), pipeline)
    with torch.no_grad(), LayerAttentionRecorder(trained.model) as recorder:
        for path in images:
            trained.model.extract_feat(loaded.prepare(path).inputs)
    return [stage.weights.numpy().mean(0) for stage in recorder.stages()]


def draw_map(axes, weights, largest):
    """Draw a (T, T) map; layers count from 1."""
    side = len(weights) + 0.5
    style = dict(vmin=-largest, vmax=largest, cmap="RdBu_r", extent=(0.5, side, side, 0.5))
    axes.imshow(np.ma.masked_invalid(weights), **style)
    axes.set_xticks(range(1, len(weights) + 1))
    axes.set_yticks(range(1, len(weights) + 1))
    axes.tick_params(labelsize=7, length=2)
