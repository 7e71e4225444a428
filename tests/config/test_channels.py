"""A ResNet's channels against its neck's."""

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


def test_configs_fit():
    """The ResNet configs are not refused."""
    for name in ("mask_rcnn_r101_1x", "retinanet_r50_mrla_light_1x", "quickstart/mask_rcnn_r18_mrla_light_shapes"):
        cfg = Config.fromfile(ROOT / f"configs/{name}.py")
        assert output_channels(cfg.model.backbone, "mmdet") == list(cfg.model.neck.in_channels)
        check_channels(cfg.model, scope="mmdet")
