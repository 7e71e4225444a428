"""Detectors and classifiers of the families of backbones train all parameters, and predict."""

import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope

from .test_configs import load

TINY_ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
TINY_PVT = dict(embed_dims=16, num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2))
TINY_DETECTORS = {  # backbone arguments and channels for the neck
    "retinanet_ceit_t_mrla_light_1x": (dict(arch=TINY_ARCH, img_size=32, stem_channels=8), 32),
    "mask_rcnn_pvtv2_b0_mrla_base_1x": (TINY_PVT, [16, 32, 32, 64]),
}
TINY_CLASSIFIERS = {  # backbone arguments and channels for the head
    "deit_tiny_mrla_light_8xb128": (dict(arch=TINY_ARCH, img_size=32), 32),
    "efficientnet_b0_mrla_light_8xb96": (dict(), 1280),
}


def train(cfg, batch):
    """Train two steps; norms leave zero in the first. Return what did not change, too."""
    torch.manual_seed(0)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    model.init_weights()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for _ in range(2):
        losses = model.train_step(batch, optim_wrapper)
    after = model.named_parameters()
    unchanged = {key for key, parameter in after if torch.equal(parameter, before[key])}
    return model, losses["loss"].item(), unchanged


@pytest.mark.parametrize("name", TINY_DETECTORS)
def test_detector_on_two_aspect_ratios(name):
    cfg = load(f"transformers/{name}")
    backbone, channels = TINY_DETECTORS[name]
    cfg.model.backbone.update(**backbone, init_cfg=None)
    cfg.model.neck.in_channels = channels
    if "mask_rcnn" in name:
        cfg.model.roi_head.bbox_head.fc_out_channels = 32
        cfg.model.train_cfg.rpn_proposal.max_per_img = cfg.model.test_cfg.rpn.max_per_img = 32
        cfg.model.train_cfg.rcnn.sampler.num = 16
    batch = demo_mm_inputs(2, [(3, 64, 112), (3, 96, 56)], num_items=[1, 2], with_mask=True)
    model, loss, unchanged = train(cfg, batch)
    assert 0 < loss < 100
    unchanged = {key for key in unchanged if ".mrla.attention." not in key}
    assert not {key for key in unchanged if key.startswith(("backbone", "neck"))}
    model.eval()
    with torch.no_grad():
        results = model.test_step(batch)
    assert [result.batch_input_shape for result in results] == [(96, 128)] * 2
    assert all(torch.isfinite(result.pred_instances.bboxes).all() for result in results)


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_classifier(name):
    from mmpretrain.structures import DataSample

    if "efficientnet" in name:
        pytest.importorskip("timm", reason="EfficientNet's recipe has its RMSProp")
    cfg = load(f"imagenet/{name}")
    backbone, channels = TINY_CLASSIFIERS[name]
    cfg.model.backbone.update(backbone)
    cfg.model.head.update(in_channels=channels, num_classes=5)
    cfg.model.data_preprocessor = dict(num_classes=5)
    samples = [DataSample().set_gt_label(label) for label in (0, 3)]
    images = [torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8) for _ in samples]
    model, loss, unchanged = train(cfg, dict(inputs=images, data_samples=samples))
    assert 0 < loss < 20
    assert not {key for key in unchanged if key.endswith(("mrla.norm.weight", "proj.weight"))}
    scales = [p for key, p in model.named_parameters() if key.endswith("mrla.norm.weight")]
    assert all(scale.mean() > 0.5 for scale in scales)
