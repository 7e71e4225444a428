"""The DeiT configs build with the paper's settings; a detector of theirs trains, saves, tests and resumes."""

import re

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

from mrla_mm.attention import TokenAttentionResidual
from mrla_mm.backbones import MRLAViT, ViT
from mrla_mm.errors import InputError
from mrla_mm.necks import SimpleFeaturePyramid

from .test_configs import CONFIGS, build, load

CHANNELS = {"tiny": 192, "small": 384, "base": 768}
SIZES = {size[0]: size for size in CHANNELS}
MODELS_OF_THE_PAPER = [(size, variant) for size in CHANNELS for variant in ("plain", "light")] + [("tiny", "base")]
DETECTION = [
    f"{detector}_deit_{size[0]}_1x" if variant == "plain" else f"{detector}_deit_{size[0]}_mrla_{variant}_1x"
    for detector in ("retinanet", "mask_rcnn")
    for size, variant in MODELS_OF_THE_PAPER
]
PARAMETERS = {
    "deit_tiny_8xb128": 5_717_416,
    "deit_tiny_mrla_light_8xb128": 5_749_792,
    "deit_tiny_mrla_base_8xb128": 5_742_880,
    "deit_small_8xb128": 22_050_664,
    "deit_small_mrla_light_8xb128": 22_115_296,
    "deit_base_8xb128": 86_567_656,
    "deit_base_mrla_light_8xb128": 86_696_800,
}
TINY_ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)


def variant_of(name):
    found = re.search(r"_mrla_(light|base)_", name)
    return found[1] if found else "plain"


def check_attention(backbone, name):
    branches = [module for module in backbone.modules() if isinstance(module, TokenAttentionResidual)]
    if variant_of(name) == "plain":
        assert type(backbone) is ViT and not branches
        return
    assert type(backbone) is MRLAViT and backbone.starts == {0, 4, 8} and len(branches) == 12
    assert {type(branch.attention).__name__ for branch in branches} == {f"MRLA{variant_of(name).capitalize()}"}
    assert {branch.attention.channels // branch.attention.heads for branch in branches} == {16}
    assert branches[-1].drop_path.drop_prob == pytest.approx(0.1)


def test_the_lists_are_complete():
    assert {path.stem for path in CONFIGS.glob("*deit*.py")} == set(DETECTION)
    assert {path.stem for path in CONFIGS.glob("imagenet/deit*.py")} == set(PARAMETERS)


@pytest.mark.parametrize("name", DETECTION)
def test_detection_config(name):
    cfg = load(name)
    model = build(cfg)
    size = SIZES[re.search(r"deit_([tsb])_", name)[1]]
    assert f"deit_{size}_" in cfg.model.backbone.init_cfg.checkpoint
    assert model.backbone.embed_dims == CHANNELS[size]
    check_attention(model.backbone, name)
    assert type(model.neck) is SimpleFeaturePyramid
    assert (model.backbone.out_type, model.backbone.out_indices) == ("featmap", [11])
    levels = model.neck([torch.empty(1, CHANNELS[size], 16, 24, device="meta")])
    anchors = (model.bbox_head if name.startswith("retinanet") else model.rpn_head).prior_generator
    assert [(256 / level.shape[2], 384 / level.shape[3]) for level in levels] == anchors.strides
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ("AdamW", 1e-4, 0.05)
    assert "momentum" not in optimizer
    assert cfg.train_cfg.max_epochs == 12
    assert cfg.param_scheduler[-1].milestones == [8, 11]
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=16)
    assert cfg.custom_imports.imports == ["mrla_mm"]


@pytest.mark.parametrize("name", ["retinanet_deit_t_mrla_light_1x", "mask_rcnn_deit_s_1x"])
def test_layer_decay_of_a_detector(name):
    cfg = load(name)
    model = build(cfg)
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    by_name = {group["param_name"]: group for group in groups}
    assert set(by_name) == {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    for key, group in by_name.items():
        block = re.match(r"backbone\.layers\.(\d+)\.", key)
        embedding = re.match(r"backbone\.(cls_token|pos_embed|patch_embed)", key)
        behind = 12 - int(block[1]) if block else 13 if embedding else 0
        assert group["lr"] == pytest.approx(1e-4 * 0.75**behind), key
        free = group["params"][0].dim() == 1 or key.endswith(("cls_token", "pos_embed"))
        assert group["weight_decay"] == (0 if free else 0.05), key


def test_layer_decay_needs_a_backbone_that_knows_its_depth():
    cfg = load("retinanet_r50_mrla_light_1x")
    cfg.optim_wrapper = load("retinanet_deit_t_1x").optim_wrapper
    with pytest.raises(InputError, match="RetinaNet with the backbone MRLAResNet.*optim_wrapper.constructor"):
        build_optim_wrapper(build(cfg), cfg.optim_wrapper)


@pytest.mark.parametrize("name", PARAMETERS)
def test_imagenet_config(name):
    from mmpretrain.registry import MODELS

    cfg = load(f"imagenet/{name}")
    init_default_scope("mmpretrain")
    with torch.device("meta"):
        model = MODELS.build(cfg.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    check_attention(model.backbone, name)
    assert cfg.model.backbone.get("zero_init_attention", False) is False
    assert cfg.model.backbone.drop_path_rate == 0.1

    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ("AdamW", pytest.approx(1e-3), 0.05)
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=1024)
    assert cfg.train_dataloader.batch_size * 8 == 1024
    assert cfg.train_cfg.max_epochs == 300
    warm_up, decay = cfg.param_scheduler
    assert (warm_up.end, decay.type, decay.begin, decay.end) == (5, "CosineAnnealingLR", 5, 300)
    assert cfg.train_dataloader.sampler == dict(type="RepeatAugSampler", num_repeats=3)
    steps = {step.type: step for step in cfg.train_dataloader.dataset.pipeline}
    assert "RandAugment" in steps and steps["RandomErasing"].erase_prob == 0.25
    assert cfg.model.train_cfg.augments == [dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]
    assert cfg.model.head.loss == dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original")


def test_a_classifier_trains_a_step():
    from mmpretrain.registry import MODELS
    from mmpretrain.structures import DataSample

    cfg = load("imagenet/deit_tiny_mrla_light_8xb128")
    cfg.model.backbone.update(arch=TINY_ARCH, img_size=32)
    cfg.model.head.update(in_channels=32, num_classes=5)
    cfg.model.data_preprocessor = dict(num_classes=5)
    init_default_scope("mmpretrain")
    model = MODELS.build(cfg.model)
    model.init_weights()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    samples = [DataSample().set_gt_label(label) for label in (0, 3)]
    batch = dict(inputs=[torch.randint(0, 255, (3, 32, 32), dtype=torch.uint8) for _ in samples], data_samples=samples)
    losses = [float(model.train_step(batch, optim_wrapper)["loss"]) for _ in range(2)]
    assert all(0 < loss < 10 for loss in losses)
    assert model.backbone.layers[0].mrla.attention.history_scale.ne(1).any()


def tiny(name):
    cfg = load(name)
    cfg.model.backbone.update(arch=TINY_ARCH, img_size=32, init_cfg=None)
    cfg.model.neck.in_channels = 32
    if "roi_head" in cfg.model:
        cfg.model.roi_head.bbox_head.fc_out_channels = 32
        cfg.model.train_cfg.rpn_proposal.max_per_img = cfg.model.test_cfg.rpn.max_per_img = 50
        cfg.model.train_cfg.rcnn.sampler.num = 16
    return cfg


def draw_image(height, width):
    """An uint8 image with one box, and mask, of class 1, as the data loader gives it."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    image = torch.randint(0, 60, (3, height, width), dtype=torch.uint8)
    image[:, 8:40, 8:48] = 220
    mask = torch.zeros(1, height, width, dtype=torch.uint8)
    mask[:, 8:40, 8:48] = 1
    sample = DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1, 1)))
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[8.0, 8.0, 48.0, 40.0]]),
        labels=torch.tensor([1]),
        masks=BitmapMasks(mask.numpy(), height, width),
    )
    return image, sample


@pytest.mark.parametrize(
    "name", ["retinanet_deit_t_mrla_light_1x", "mask_rcnn_deit_s_mrla_light_1x", "mask_rcnn_deit_t_mrla_base_1x"]
)
def test_two_aspect_ratios_in_a_batch_train_and_predict(name):
    from mmdet.registry import MODELS

    torch.manual_seed(0)
    cfg = tiny(name)
    init_default_scope("mmdet")
    model = MODELS.build(cfg.model)
    model.init_weights()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    images, samples = zip(*(draw_image(*size) for size in ((64, 112), (96, 56))), strict=True)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    for _ in range(2):  # queries and keys see nothing of a branch that starts as an identity
        losses = model.train_step(dict(inputs=list(images), data_samples=list(samples)), optim_wrapper)
    assert 0 < float(losses["loss"]) < 100
    still = {key for key, parameter in model.named_parameters() if torch.equal(parameter, before[key])}
    assert not {key for key in still if key.startswith(("backbone", "neck"))}
    model.eval()
    with torch.no_grad():
        results = model.test_step(dict(inputs=list(images), data_samples=list(samples)))
    assert [result.batch_input_shape for result in results] == [(96, 128)] * 2
    assert all(torch.isfinite(result.pred_instances.bboxes).all() for result in results)
