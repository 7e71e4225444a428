"""A ResNet's channels against its neck's."""

import pytest
from mmengine.config import Config
from torch import nn

from mrla_mm.config import check_channels
from mrla_mm.config.channels import output_channels
from mrla_mm.errors import InputError

from ..conftest import ROOT

FPN = dict(type="FPN", in_channels=[256, 512, 1024, 2048], out_channels=256, num_outs=5)


def test_channels_that_do_not_fit_are_named():
    """Both lists are named and the option that mends it, for lists of necks too."""
    backbone = dict(type="MRLAResNet", depth=18)
    with pytest.raises(InputError) as caught:
        check_channels(dict(backbone=backbone, neck=FPN), scope="mmdet")
    said = str(caught.value)
    assert "MRLAResNet, depth=18" in said and "[256, 512, 1024, 2048]" in said
    assert "--cfg-options model.neck.in_channels=[64,128,256,512]" in said
    with pytest.raises(InputError, match=r"model\.neck\.0\.in_channels=\[64,128,256,512\]"):
        check_channels(dict(backbone=backbone, neck=[FPN, dict(type="BFP", in_channels=256)]), scope="mmdet")
    check_channels(dict(backbone={**backbone, "depth": 50}, neck=FPN), scope="mmdet")


@pytest.mark.parametrize(
    "backbone, channels",
    [
        (dict(type="MRLAResNet", depth=18, base_channels=32, out_indices=(1, 2)), [64, 128]),
        (dict(type="ResNet", depth=101, out_indices=(3,)), [2048]),
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
    import torch
    from mmdet.registry import MODELS

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

    backbone = dict(type="MRLAResNet", depth=50)
    check_channels(dict(backbone=backbone, neck=dict(type=SomeMaps, in_channels=[512, 1024])), scope="mmdet")
    check_channels(dict(backbone=dict(type="ResNet", depth=50), neck=FPN), scope="mmpretrain")
    check_channels(dict(backbone=dict(type="ResNet", depth=50)), scope="mmpretrain")


def test_configs_fit():
    """The ResNet configs are not refused."""
    for name in ("mask_rcnn_r101_1x", "retinanet_r50_mrla_light_1x", "quickstart/mask_rcnn_r18_mrla_light_shapes"):
        cfg = Config.fromfile(ROOT / f"configs/{name}.py")
        assert output_channels(cfg.model.backbone, "mmdet") == list(cfg.model.neck.in_channels)
        check_channels(cfg.model, scope="mmdet")
