"""Architectures of mmdet, mmseg, mmpretrain and mmpose train and predict with our backbones."""

import re
from functools import partial
from pathlib import Path

import mmdet
import numpy as np
import pytest
import torch
from mmdet.testing import demo_mm_inputs, demo_mm_proposals, demo_track_inputs
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData

from mrla_mm.backbones import MRLAResNet
from mrla_mm.backbones.with_layer_attention import AnyBackbone

from .conftest import ROOT

pytestmark = pytest.mark.slow
MIM = Path(mmdet.__file__).parent / ".mim"
PAGE = (ROOT / "docs/use_in_your_project.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Detectors of mmdet's zoo")[2].partition("\n## ")[0]
TABLE = "".join(re.findall(r"^\|(?!.*`configs`).*", SECTION, re.MULTILINE))
FOLDERS = re.findall(r"`(.+?)`", TABLE)
PACKAGES = dict(boxinst="skimage", lad="sklearn", paa="sklearn")  # needed with a plain ResNet too
VIDEO = {"mask2former_vis", "masktrack_rcnn", "qdtrack"}
CASES = [(folder, "MRLALight") for folder in FOLDERS]
CASES += [(folder, "MRLABase") for folder in ("detr", "mask_rcnn", "retinanet")]
OWN_BACKBONES = {  # of docs/any_backbone.md
    "convnext": "mask-rcnn_*",
    "cornernet": "*_10xb5-*",
    "detectors": "detectors_cascade-rcnn_r50*",
    "efficientnet": "retinanet_effb3*",
    "faster_rcnn": "*_x101-32x4d_fpn_1x*",
    "hrnet": "faster-rcnn_hrnetv2p-w18-1x*",
    "regnet": "faster-rcnn_regnetx-3.2GF_fpn_1x*",
    "res2net": "faster-rcnn_*",
    "resnest": "faster-rcnn_s50*",
    "rtmdet": "rtmdet_tiny*",
    "ssd": "ssdlite*",
    "swin": "mask-rcnn_swin-t-p4-w7_fpn_1x*",
    "tridentnet": "*caffe_1x*",
    "yolo": "yolov3_d53_8xb8-ms-416*",
    "yolox": "yolox_tiny*",
}
LIMITS = dict(nms_pre=50, num=16)  # of boxes and samples, for speed


def our_resnet(variant, key, backbone):
    if backbone.get("type") == "ResNet":
        return dict(type="MRLAResNet", layer_attention=dict(type=variant))
    return {}


def layer_attention(key, backbone):
    return dict(type="WithLayerAttention", backbone=backbone.type) if key == "backbone" else {}


def adapt(node, exchange):
    for key, value in list(node.items()):
        is_backbone = key.endswith("backbone") and isinstance(value, dict)
        if is_backbone and (update := exchange(key, value)):
            value.update(update)
            if "init_cfg" in value:
                value["init_cfg"] = None
            value.get("norm_cfg", {}).pop("eps", None)  # NAS-FCOS has 0, which torch refuses
        elif key in ("teacher_ckpt", "batch_augments", "init_cfg", "pretrained"):
            node[key] = None if key != "init_cfg" or "checkpoint" in (value or {}) else value
        elif key in LIMITS:
            node[key] = min(value, LIMITS[key])
        elif key in ("rpn", "rpn_proposal") and isinstance(value, dict):
            value.max_per_img = 20
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, dict):
                adapt(child, exchange)


def build(folder, pattern, exchange):
    paths = (MIM / "configs" / folder).glob(pattern)
    cfg = Config.fromfile(min(paths, key=lambda path: ("fast-rcnn" in path.name, path.name)))
    init_default_scope("mmdet")
    adapt(cfg.model, exchange)
    torch.manual_seed(0)
    now = dict(epoch=0, iter=0)  # BoxInst and TOOD ask for them
    MessageHub.get_current_instance().update_info_dict(now)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    model.init_weights()
    if folder == "queryinst":  # untrained boxes outside the image break mmdet's masks on a CPU
        for head in model.roi_head.bbox_head:
            torch.nn.init.zeros_(head.fc_reg.weight)
    for module in model.modules():
        if type(module).__name__ == "TridentConv":  # which mmdet leaves to a weight file
            torch.nn.init.normal_(module.weight, std=0.01)
    return model


def demo_inputs(folder, training):
    if folder in VIDEO:
        return demo_track_inputs(key_frames_inds=[0], num_items=[3], with_mask=True)
    images = 2 if training else 1  # guided anchoring predicts for one at a time
    side = 224 if folder in ("ddq", "dino") else 128  # for their 900 queries
    shapes = [(3, side, side)] * images
    options = dict(num_items=[2, 3][:images], with_mask=folder != "rtmdet", with_semantic=True)
    batch = demo_mm_inputs(images, shapes, **options)
    for sample, proposals in zip(batch["data_samples"], demo_mm_proposals(shapes, 20), strict=True):
        sample.gt_instances.labels.zero_()
        sample.homography_matrix = np.eye(3, dtype=np.float32)  # for Soft Teacher
        if folder == "fast_rcnn":
            sample.proposals = proposals
    if folder == "soft_teacher" and training:
        branches = ("sup", "unsup_teacher", "unsup_student")
        batch = {key: dict.fromkeys(branches, value) for key, value in batch.items()}
    return batch


def train_and_predict(model, folder):
    model.train()
    batch = model.data_preprocessor(demo_inputs(folder, True), True)
    loss, _ = model.parse_losses(model(**batch, mode="loss"))
    loss.backward()
    assert loss.isfinite()
    if folder == "ssd":
        return  # mmdet 3.3 cannot predict with SSD, whatever its backbone
    with torch.no_grad():
        model.eval()
        found = model(**model.data_preprocessor(demo_inputs(folder, False), False), mode="predict")
    assert len(found) == 1


@pytest.mark.parametrize(("folder", "variant"), CASES)
def test_our_resnet(folder, variant, monkeypatch):
    if folder in PACKAGES:
        pytest.importorskip(PACKAGES[folder])
    monkeypatch.chdir(MIM)  # LD names its teacher's config by a relative path
    model = build(folder, "*_r50*.py", partial(our_resnet, variant))
    backbones = {name: each for name, each in model.named_modules() if isinstance(each, MRLAResNet)}
    assert backbones
    train_and_predict(model, folder)
    for name, backbone in backbones.items():
        if "teacher" not in name:
            assert all(p.grad is not None for p in backbone.parameters() if p.requires_grad)


@pytest.mark.parametrize("folder", OWN_BACKBONES)
def test_own_backbone(folder):
    model = build(folder, f"{OWN_BACKBONES[folder]}.py", layer_attention)
    assert isinstance(model.backbone, AnyBackbone)
    train_and_predict(model, folder)
    parameters = {k: p for k, p in model.backbone.named_parameters() if ".mrla." in k}
    assert parameters
    for key, parameter in parameters.items():
        assert parameter.grad is not None or not parameter.requires_grad, key


def load(package, config):
    return Config.fromfile(Path(package.__file__).parent / ".mim/configs" / config).model


def predict_behind_a_step(model, batch):
    """Return the predictions after a backward pass that reaches every parameter."""
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, True), mode="loss"))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        return model.eval()(**model.data_preprocessor(batch, False), mode="predict")


OURS = dict(type="MRLAResNet")
ANY = dict(type="WithLayerAttention", backbone="ResNetV1c")
WIDTHS = [16, 32, 32, 64]
MSCAN = dict(ANY, backbone="MSCAN", embed_dims=WIDTHS, depths=[2] * 4)
MSCAN |= dict(norm_cfg=dict(type="BN"))
SEGMENTERS = [("upernet_r50", MSCAN), ("deeplabv3_r50-d8", ANY)]
SEGMENTERS += [(f"{name}_r50-d8", OURS) for name in ("deeplabv3", "pspnet", "fcn")]


@pytest.mark.parametrize(("name", "backbone"), [*SEGMENTERS, ("upernet_r50", OURS)])
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
    (found, _) = predict_behind_a_step(model, dict(inputs=images, data_samples=samples))
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
    (found, _) = predict_behind_a_step(model, dict(inputs=images, data_samples=samples))
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
    found = predict_behind_a_step(model, batch)[0]
    assert found.pred_instances.keypoints.shape == (1, 17, 2)
