"""Configs of mmseg, mmpretrain and mmpose with our backbones in place train and predict."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData

pytestmark = pytest.mark.slow


def load(package, config):
    return Config.fromfile(Path(package.__file__).parent / ".mim/configs" / config).model


def train_and_predict(model, batch):
    """Return the predictions after a backward pass that reaches every parameter."""
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, True), mode="loss"))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        return model.eval()(**model.data_preprocessor(batch, False), mode="predict")


OURS = dict(type="MRLAResNet")
ANY = dict(type="WithLayerAttention", backbone="ResNetV1c")
WIDTHS = [16, 32, 32, 64]
BN = dict(type="BN")
MSCAN = dict(ANY, backbone="MSCAN", embed_dims=WIDTHS, depths=[2] * 4, norm_cfg=BN)


CASES = [("upernet_r50", MSCAN), ("deeplabv3_r50-d8", ANY)]
CASES += [(f"{name}_r50-d8", OURS) for name in ("deeplabv3", "pspnet", "fcn")]


@pytest.mark.parametrize(("name", "backbone"), [*CASES, ("upernet_r50", OURS)])
def test_mmseg(name, backbone):
    mmseg = pytest.importorskip("mmseg")
    from mmseg.structures import SegDataSample

    init_default_scope("mmseg")
    cfg = load(mmseg, f"_base_/models/{name}.py")
    cfg.update(pretrained=None)
    cfg.data_preprocessor.size = (64, 64)
    if backbone is MSCAN:
        cfg.backbone = backbone
        cfg.decode_head.in_channels = WIDTHS
        cfg.auxiliary_head.in_channels = WIDTHS[2]
    else:
        cfg.backbone.update(backbone)
    model = revert_sync_batchnorm(MODELS.build(cfg)).train()
    meta = dict(img_shape=(64, 64), ori_shape=(64, 64))
    maps = [PixelData(data=torch.randint(19, (1, 64, 64))) for _ in "ab"]
    samples = [SegDataSample(gt_sem_seg=each, metainfo=meta) for each in maps]
    images = [torch.randint(255, (3, 64, 64), dtype=torch.uint8) for _ in samples]
    (found, _) = train_and_predict(model, dict(inputs=images, data_samples=samples))
    assert found.pred_sem_seg.shape == (64, 64)


def test_mmpretrain():
    import mmpretrain
    from mmpretrain.structures import DataSample

    init_default_scope("mmpretrain")
    cfg = load(mmpretrain, "_base_/models/convnext/convnext-tiny.py")
    cfg.update(data_preprocessor=dict(to_rgb=True), train_cfg=None)
    cfg.backbone.update(type="WithLayerAttention", backbone="ConvNeXt", arch="atto")
    cfg.head.update(in_channels=320, num_classes=5)
    images = [torch.randint(255, (3, 64, 64), dtype=torch.uint8) for _ in "ab"]
    samples = [DataSample().set_gt_label(label) for label in (1, 3)]
    model = MODELS.build(cfg).train()
    (found, _) = train_and_predict(model, dict(inputs=images, data_samples=samples))
    assert found.pred_score.shape == (5,)


def test_mmpose():
    mmpose = pytest.importorskip("mmpose")
    from mmpose.testing import get_packed_inputs

    init_default_scope("mmpose")
    folder = "body_2d_keypoint/topdown_heatmap/coco"
    cfg = load(mmpose, f"{folder}/td-hm_res50_8xb64-210e_coco-256x192.py")
    cfg.backbone.update(type="MRLAResNet", init_cfg=None)
    model = MODELS.build(cfg).train()
    batch = get_packed_inputs(2, input_size=(192, 256), heatmap_size=(48, 64), img_shape=(256, 192))
    found = train_and_predict(model, batch)[0]
    assert found.pred_instances.keypoints.shape == (1, 17, 2)
