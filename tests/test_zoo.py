"""Architectures of mmdet, mmseg, mmpretrain and mmpose train and predict with our backbones."""

import re
from pathlib import Path

import mmdet
import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData

from .conftest import ROOT

pytestmark = pytest.mark.slow
MIM = Path(mmdet.__file__).parent / ".mim"
PAGE = (ROOT / "docs/use_in_your_project.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Detectors of mmdet's zoo")[2].partition("\n## ")[0]
TABLE = "".join(re.findall(r"^\|(?!.*`configs`).*", SECTION, re.MULTILINE))
FOLDERS = re.findall(r"`(.+?)`", TABLE)
# Two stages and masks, one stage, deformable convolutions, plugins, a transformer and a teacher.
TRAINED = ["mask_rcnn", "retinanet", "dcnv2", "gcnet", "deformable_detr", "soft_teacher"]
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


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    """LD and Soft Teacher name configs by a path relative to a checkout of mmdet."""
    monkeypatch.chdir(MIM)
    init_default_scope("mmdet")


def read_model(folder, pattern="*_r50*.py"):
    paths = (MIM / "configs" / folder).glob(pattern)
    return Config.fromfile(min(paths, key=lambda path: ("fast-rcnn" in path.name, path.name))).model


def detector_of(model):
    """Return the detector's config, which is the model or inside of one for videos or teachers."""
    return model.get("detector", model)


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_resnet_takes_the_arguments_of_the_zoos(folder):
    backbone = detector_of(read_model(folder)).backbone
    assert backbone.type == "ResNet"
    backbone.type = "MRLAResNet"
    backbone.get("norm_cfg", {}).pop("eps", None)  # NAS-FCOS has 0, which torch refuses
    with torch.device("meta"):
        MODELS.build(backbone)


@pytest.mark.parametrize("folder", OWN_BACKBONES)
def test_layer_attention_in_the_zoos_own_backbones(folder):
    backbone = read_model(folder, OWN_BACKBONES[folder]).backbone
    backbone.update(type="WithLayerAttention", backbone=backbone.type)
    built = MODELS.build(backbone)
    assert any(".mrla." in name for name, _ in built.named_parameters())


def limit_boxes(node):
    """Keep few boxes and samples, for speed."""
    for key, value in node.items():
        if key in ("nms_pre", "num", "max_per_img"):
            node[key] = min(value, 20)
        elif isinstance(value, dict):
            limit_boxes(value)


def demo_inputs(folder, training):
    options = dict(num_items=[2, 3], with_mask=folder != "rtmdet")
    batch = demo_mm_inputs(2, [(3, 128, 128)] * 2, **options)
    for sample in batch["data_samples"]:
        sample.gt_instances.labels.zero_()
    if folder == "soft_teacher" and training:
        for sample in batch["data_samples"]:
            sample.homography_matrix = torch.eye(3).numpy()
        branches = ("sup", "unsup_teacher", "unsup_student")
        batch = {key: dict.fromkeys(branches, value) for key, value in batch.items()}
    return batch


def train_and_predict(cfg, folder):
    torch.manual_seed(0)
    limit_boxes(detector_of(cfg))
    detector_of(cfg).backbone.init_cfg = None
    model = revert_sync_batchnorm(MODELS.build(cfg)).train()
    model.init_weights()
    batch = model.data_preprocessor(demo_inputs(folder, True), True)
    loss, _ = model.parse_losses(model(**batch, mode="loss"))
    loss.backward()
    assert loss.isfinite()
    attention = {key: each for key, each in model.named_parameters() if ".mrla." in key}
    assert attention
    for key, parameter in attention.items():
        assert parameter.grad is not None or not parameter.requires_grad, key
    with torch.no_grad():
        model.eval()
        found = model(**model.data_preprocessor(demo_inputs(folder, False), False), mode="predict")
    assert len(found) == 2


@pytest.mark.parametrize("folder", TRAINED)
def test_detectors_with_our_resnet(folder):
    cfg = read_model(folder)
    detector_of(cfg).backbone.type = "MRLAResNet"
    train_and_predict(cfg, folder)


@pytest.mark.parametrize("folder", ["rtmdet", "swin"])
def test_detectors_with_layer_attention_in_their_own_backbone(folder):
    cfg = read_model(folder, OWN_BACKBONES[folder])
    cfg.backbone.update(type="WithLayerAttention", backbone=cfg.backbone.type)
    cfg.data_preprocessor.batch_augments = None
    train_and_predict(cfg, folder)


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


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("upernet_r50", OURS), ("deeplabv3_r50-d8", OURS), ("deeplabv3_r50-d8", ANY)],
)
def test_mmseg(name, backbone):
    mmseg = pytest.importorskip("mmseg")
    from mmseg.structures import SegDataSample

    init_default_scope("mmseg")
    cfg = load(mmseg, f"_base_/models/{name}.py")
    cfg.update(pretrained=None)
    cfg.data_preprocessor.size = (64, 64)
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
