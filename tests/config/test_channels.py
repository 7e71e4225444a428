"""A ResNet's channels against its neck's, and a neck's against the heads'."""

from contextlib import nullcontext

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

from mrla_mm.config import check_channels
from mrla_mm.config.channels import output_channels
from mrla_mm.errors import InputError

from ..conftest import ROOT

FPN = dict(type="FPN", in_channels=[256, 512, 1024, 2048], out_channels=256, num_outs=5)
R18 = dict(type="MRLAResNet", depth=18)


def check(backbone, neck, *, detector="RetinaNet", scope="mmdet"):
    check_channels(dict(type=detector, backbone=backbone, neck=neck), scope=scope)


def runs(backbone, neck):
    """Whether the neck takes what the backbone puts out."""
    with torch.device("meta"), MODELS.switch_scope_and_registry("mmdet") as registry:
        maps = registry.build(backbone)(torch.zeros(2, 3, 128, 128))
        built = registry.build(neck)
        try:
            return bool(built(maps))
        except (RuntimeError, AssertionError):
            return False


def test_channels_that_do_not_fit_are_named():
    """Both lists are named and the option that mends it, for lists of necks too."""
    with pytest.raises(InputError) as caught:
        check(R18, FPN)
    said = str(caught.value)
    assert "MRLAResNet, depth=18" in said and "[256, 512, 1024, 2048]" in said
    assert "--cfg-options model.neck.in_channels=[64,128,256,512]" in said
    with pytest.raises(InputError, match=r"model\.neck\.0\.in_channels=\[64,128,256,512\]"):
        check(R18, [FPN, dict(type="BFP", in_channels=256)])
    check({**R18, "depth": 50}, FPN)


@pytest.mark.parametrize(
    "backbone, channels",
    [
        (dict(type="MRLAResNet", depth=18, base_channels=32, out_indices=(1, 2)), [64, 128]),
        (dict(type="ResNet", depth=101, out_indices=(3,)), [2048]),
        (dict(type="ResNet", depth=18, out_indices=(3, 1)), [128, 512]),
        (dict(type="mmdet.ResNet", depth=34), [64, 128, 256, 512]),
        (dict(type="ResNeXt", depth=50, groups=32, base_width=4), [256, 512, 1024, 2048]),
        (dict(type="ResNet", depth=19), None),
        (dict(type="ResNet", depth=50, out_indices="3"), None),
        (dict(type="mmpretrain.ResNet", depth=50), None),
        (dict(type="mmpretrain.ResNet_CIFAR", depth=18), None),
        (dict(type="MRLAPVTv2"), None),
        (dict(type="Unheard", depth=50), None),
        (None, None),
    ],
)
def test_channels_of_backbones(backbone, channels):
    """Known for ResNets; where they are, they are those of the maps that the backbone puts out."""
    assert output_channels(backbone, "mmdet") == channels
    if channels:
        with torch.device("meta"), MODELS.switch_scope_and_registry("mmdet") as registry:
            maps = registry.build(backbone)(torch.zeros(1, 3, 64, 64))
        assert [each.shape[1] for each in maps] == channels


def test_what_a_necks_author_decides_is_not_judged():
    """A user's neck may take some of the maps; mmpretrain's ResNets have blocks without mmdet's `expansion`."""

    class SomeMaps(nn.Module):
        def __init__(self, in_channels):
            super().__init__()

    class Between(nn.Module):
        pass

    check(dict(type="MRLAResNet", depth=50), dict(type=SomeMaps, in_channels=[512, 1024]))
    check(R18, FPN, detector=Between)
    check(dict(type="ResNet", depth=50), FPN, scope="mmpretrain")
    check(R18, {**FPN, "end_level": None})
    check_channels(dict(backbone=dict(type="ResNet", depth=50)), scope="mmpretrain")


PYRAMID = dict(out_channels=8, num_outs=3)
CELLS = dict(out_channels=8, num_outs=5, stack_times=1)
SSD = dict(level_strides=(2,), level_paddings=(1,), l2_norm_scale=None)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(
    "neck",
    [
        dict(type="FPN", in_channels=[64, 128, 256, 512], out_channels=8, num_outs=5),
        dict(type="FPN", in_channels=[1, 128, 256, 512], start_level=1, add_extra_convs="on_input", **PYRAMID),
        dict(type="FPN", in_channels=[1, 128, 256, 1], start_level=1, end_level=2, out_channels=8, num_outs=2),
        dict(type="FPN_DropBlock", in_channels=[1, 128, 256, 512], start_level=1, **PYRAMID),
        dict(type="PAFPN", in_channels=[1, 128, 256, 512], start_level=1, **PYRAMID),
        dict(type="ChannelMapper", in_channels=[64, 128, 256, 512], out_channels=32, num_outs=5),
        dict(type="YOLOXPAFPN", in_channels=[64, 128, 256, 512], out_channels=8),
        dict(type="CSPNeXtPAFPN", in_channels=[64, 128, 256, 512], out_channels=8),
        dict(type="SSH", num_scales=4, in_channels=[64, 128, 256, 512], out_channels=[8] * 4),
    ],
)
def test_a_neck_that_takes_all_maps_is_judged_as_it_runs(neck, changed):
    """Levels before `start_level` and after `end_level` may say what they like; another width is refused, and ends."""
    if changed:
        neck = {**neck, "in_channels": [*neck["in_channels"][:2], 96, *neck["in_channels"][3:]]}
        with pytest.raises(InputError, match="in_channels"):
            check(R18, neck)
    else:
        check(R18, neck)
    assert runs(R18, neck) is not changed


@pytest.mark.parametrize(
    "levels, neck",
    [
        ((0, 1, 2, 3), dict(type="NASFPN", in_channels=[64, 128, 256], **CELLS)),
        ((0, 1, 2, 3), dict(type="NASFPN", in_channels=[1, 128, 256, 512], start_level=1, **CELLS)),
        ((1, 2, 3), dict(type="YOLOV3Neck", num_scales=3, in_channels=[512, 256, 128], out_channels=[32, 16, 8])),
        ((0, 1, 2, 3), dict(type="HRFPN", in_channels=[512, 256, 128, 64], out_channels=8)),
        ((0, 1, 2, 3), dict(type="SSDNeck", in_channels=(64, 512), out_channels=(64, 512, 16), **SSD)),
        ((0, 1, 2, 3), dict(type="NASFCOS_FPN", in_channels=[1, 128, 256, 512], out_channels=8, num_outs=4)),
    ],
)
def test_a_neck_with_rules_of_its_own_is_not_refused(levels, neck):
    """Some of the maps, another order, or from the last on: each of these runs."""
    backbone = {**R18, "out_indices": levels}
    check(backbone, neck)
    assert runs(backbone, neck)


def heads(**changes):
    """A two-stage detector's config; changes have places with two underscores for each dot."""
    extractor = dict(type="SingleRoIExtractor", out_channels=256, featmap_strides=[4, 8])
    roi_head = dict(
        type="CascadeRoIHead",
        bbox_roi_extractor=extractor,
        bbox_head=[dict(type="Shared2FCBBoxHead", in_channels=256), dict(type="DIIHead", in_channels=9)],
        mask_roi_extractor=dict(extractor),
        mask_head=dict(type="FCNMaskHead", in_channels=256),
    )
    cfg = Config(dict(model=dict(type="CascadeRCNN", neck=FPN, rpn_head=dict(type="RPNHead", in_channels=256))))
    cfg.model.roi_head = roi_head
    cfg.merge_from_dict({f"model.{place.replace('__', '.')}": value for place, value in changes.items()})
    return cfg.model


@pytest.mark.parametrize(
    "place",
    [
        "rpn_head.in_channels",
        "roi_head.bbox_roi_extractor.out_channels",
        "roi_head.bbox_head.0.in_channels",
        "roi_head.mask_roi_extractor.out_channels",
        "roi_head.mask_head.in_channels",
    ],
)
def test_heads_for_other_channels_than_the_necks_are_named(place):
    """The option shown mends it; another neck names all of the parts that do not fit it."""
    check_channels(heads(), scope="mmdet")
    with pytest.raises(InputError) as caught:
        check_channels(heads(**{place.replace(".", "__"): 128}), scope="mmdet")
    said = str(caught.value)
    assert f"FPN) puts out maps of out_channels=256, but model.{place}=128: " in said
    assert f"--cfg-options model.{place}=256 (or" in said
    with pytest.raises(InputError, match=rf"maps of out_channels=64, .* model\.{place}=64 "):
        check_channels(heads(neck__out_channels=64), scope="mmdet")


@pytest.mark.parametrize("kind", ["RetinaHead", "FCOSHead", "YOLOXHead"])
def test_a_dense_head_is_judged_as_it_runs(kind):
    """What is refused ends in the head's first convolution."""

    def ends(channels):
        head = dict(type=kind, num_classes=2, in_channels=channels, stacked_convs=1)
        with torch.device("meta"), MODELS.switch_scope_and_registry("mmdet") as registry:
            maps = [torch.zeros(1, 256, 8, 8)] * (3 if kind == "YOLOXHead" else 5)
            built = registry.build(head)
            with pytest.raises(RuntimeError, match="channel") if channels != 256 else nullcontext():
                built(maps)
        check_channels(dict(type="RetinaNet", neck=FPN, bbox_head=head), scope="mmdet")

    ends(256)
    with pytest.raises(InputError, match=r"bbox_head\.in_channels=128"):
        ends(128)


def test_heads_that_need_not_have_the_necks_channels_are_not_refused():
    """One map, extractors that gather otherwise, a head in between, a neck that changes nothing, heads of others."""

    class MyHead(nn.Module):
        def __init__(self, in_channels):
            super().__init__()

    one_map = dict(roi_head__bbox_roi_extractor__featmap_strides=[16], roi_head__bbox_roi_extractor__out_channels=9)
    check_channels(heads(**one_map), scope="mmdet")
    gathered = dict(type="GenericRoIExtractor", aggregation="concat", out_channels=9)
    check_channels(heads(roi_head__mask_roi_extractor=gathered, roi_head__mask_head__in_channels=512), scope="mmdet")
    between = dict(type="ResLayer", depth=50)
    check_channels(heads(roi_head__shared_head=between, roi_head__mask_head__in_channels=2048), scope="mmdet")
    check_channels(heads(rpn_head=dict(type=MyHead, in_channels=3)), scope="mmdet")
    check_channels(heads(neck=[FPN, dict(type="BFP", in_channels=256)], rpn_head__in_channels=3), scope="mmdet")


def test_configs_fit():
    """The ResNet configs are not refused."""
    for name in ("mask_rcnn_r101_1x", "retinanet_r50_mrla_light_1x", "quickstart/mask_rcnn_r18_mrla_light_shapes"):
        cfg = Config.fromfile(ROOT / f"configs/{name}.py")
        assert output_channels(cfg.model.backbone, "mmdet") == list(cfg.model.neck.in_channels)
        check_channels(cfg.model, scope="mmdet")
