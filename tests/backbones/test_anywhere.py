"""Layer attention in backbones of mmdet, mmpretrain and timm, found by what their blocks do."""

import copy
import pickle

import pytest
import torch
from mmengine.model import BaseModule, convert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mrla_mm.backbones.anywhere import find_runs
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

from .common import branches, randomize, randomize_zero_init

IMAGE = torch.rand(2, 3, 128, 160)
STEPS = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))
BASIC = dict(num_branches=1, num_modules=1, block="BASIC", num_blocks=(2,), num_channels=(18,))
HRNET = dict(
    stage1=dict(BASIC, block="BOTTLENECK", num_channels=(8,)),
    stage2=dict(BASIC, num_branches=2, num_blocks=(2, 2), num_channels=(18, 36)),
    stage3=dict(BASIC, num_branches=3, num_blocks=(2,) * 3, num_channels=(18, 36, 72)),
    stage4=dict(BASIC, num_branches=4, num_blocks=(2,) * 4, num_channels=(18, 36, 72, 144)),
)
HOURGLASS = dict(stage_channels=[16] * 6, stage_blocks=[2] * 6, num_stacks=1, feat_channel=16)
SAC = dict(sac=dict(type="SAC", use_deform=False), stage_with_sac=(False, True, True, True))
TRIDENT = dict(num_branch=3, test_branch_idx=1, trident_dilations=(1, 2, 3))
CSP = dict(deepen_factor=0.33, widen_factor=0.25)
CONVNEXT = dict(arch="atto", out_indices=(0, 1, 2, 3), gap_before_final_norm=False)
# Class, arguments and number of blocks with layer attention; the depth is that of the published
# networks where it cannot be chosen
HOSTS = {
    "mmdet.ResNeXt": (dict(depth=50, groups=4, base_channels=16), 16),
    "mmdet.Res2Net": (dict(depth=50, scales=4, base_width=26, base_channels=16), 16),
    "mmdet.RegNet": (dict(arch="regnetx_400mf"), 21),
    "mmdet.ResNeSt": (dict(depth=50, base_channels=16), 16),
    "mmdet.DetectoRS_ResNet": (dict(depth=50, conv_cfg=dict(type="ConvAWS"), **SAC), 16),
    "mmdet.TridentResNet": (dict(depth=50, **TRIDENT, **STEPS), 7),
    "mmdet.HRNet": (dict(extra=HRNET), 20),
    "mmdet.HourglassNet": (HOURGLASS, 32),
    "mmdet.Darknet": (dict(depth=53), 22),
    "mmdet.CSPDarknet": (CSP, 6),
    "mmdet.CSPNeXt": (CSP, 6),
    "mmdet.MobileNetV2": (dict(widen_factor=0.5), 15),
    "mmdet.SwinTransformer": (dict(embed_dims=48), 12),
    "mmdet.EfficientNet": (dict(arch="b0"), 14),
    "mmpretrain.ConvNeXt": (CONVNEXT, 12),
    "mmpretrain.ConvNeXt V2": (dict(CONVNEXT, use_grn=True, layer_scale_init_value=0.0), 12),
    "mmpretrain.HorNet": (dict(arch="tiny"), 25),
    "mmpretrain.PoolFormer": (dict(arch="s12"), 12),
    "mmpretrain.RepVGG": (dict(arch="A0"), 20),
    "mmpretrain.EfficientNetV2": (dict(arch="b0"), 20),
    "mmpretrain.RegNet": (dict(arch="regnetx_400mf"), 21),
    "mmpretrain.SEResNet": (dict(depth=50, base_channels=16, se_ratio=4), 16),
    "mmpretrain.EdgeNeXt": (dict(arch="xxsmall"), 7),
    "mmpretrain.CSPResNeXt": (dict(depth=50), 13),
    "mmpretrain.ResNetV1c": (dict(depth=50, base_channels=16), 18),
    "mmpretrain.MobileNetV2": (dict(), 17),
    "mmpretrain.TIMMBackbone": (dict(model_name="resnet18"), 8),
}


@pytest.fixture(params=HOSTS)
def host(request):
    """Name and arguments of a host, and how many of its blocks get layer attention."""
    if request.param.endswith("TIMMBackbone"):
        pytest.importorskip("timm")
    name = request.param.partition(" ")[0]
    init_default_scope(name.partition(".")[0])
    arguments, blocks = HOSTS[request.param]
    yield name, copy.deepcopy(arguments), blocks
    init_default_scope("mmengine")


def build(name, **kwargs):
    return MODELS.build(dict(type="WithLayerAttention", backbone=name, **kwargs))


def levels(backbone, image=IMAGE):
    found = backbone(image)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def assert_equal(found, expected):
    for level, other in zip(found, expected, strict=True):
        assert torch.equal(level, other)


def test_starts_as_an_identity_with_plain_weights_and_trains_every_branch(host, tmp_path):
    name, arguments, blocks = host
    plain = MODELS.build(dict(type=name, **copy.deepcopy(arguments)))
    plain.init_weights()
    state = randomize(plain).state_dict() if "Trident" in name else plain.state_dict()
    torch.save(dict(state_dict=state), tmp_path / "plain.pth")
    ours = build(name, **arguments)
    assert isinstance(ours, type(plain)) and len(branches(ours)) == blocks
    ours.init_weights()
    load_weights(ours, tmp_path / "plain.pth")
    assert state.keys() == {key for key in ours.state_dict() if ".mrla." not in key}
    for backbone in (plain, ours):
        backbone.train(False)
    with torch.no_grad():
        assert_equal(levels(ours), levels(plain))
        randomize_zero_init(ours)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert_equal(levels(other), levels(ours))
        assert not torch.equal(levels(ours)[-1], levels(plain)[-1])
    ours.train(True)
    sum(level.float().square().mean() for level in levels(ours)).backward()
    unused = {key for key, parameter in ours.named_parameters() if parameter.grad is None}
    assert not [key for key in unused if ".mrla." in key]


def test_looking_for_runs_changes_nothing():
    backbone = MODELS.build(dict(type="mmdet.CSPNeXt", **CSP))
    state = copy.deepcopy(backbone.state_dict())
    swin = MODELS.build(dict(type="mmdet.SwinTransformer", embed_dims=48))  # has drop path
    random_state = torch.get_rng_state()
    assert len(find_runs(swin, 3)) == 4
    runs = find_runs(backbone, 3)
    assert {run.container: run.channels for run in runs} == {
        "stem": 8,
        "stage2.1.blocks": 32,
        "stage3.1.blocks": 64,
    }
    assert torch.equal(torch.get_rng_state(), random_state) and backbone.training
    assert_equal(backbone.state_dict().values(), state.values())
    assert not any(module._forward_hooks for module in backbone.modules())


class Block(nn.Module):
    def __init__(self, taken, returned):
        super().__init__()
        self.conv = nn.Conv2d(taken, returned, 3, padding=1)

    def forward(self, x):
        return self.conv(x).tanh()


class Kin(Block):
    pass


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Block(8, 8), Block(8, 8))

    def forward(self, x):
        return self.inner(x)


class Reversed(nn.Sequential):
    def forward(self, x):
        return super().forward(-x)


class Network(BaseModule):
    """Two runs in one container, and what is none: layers, nested containers, own forwards."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
        self.runs = nn.Sequential(Block(8, 8), Block(8, 8), Kin(8, 16), Kin(16, 16), Block(16, 8))
        self.nested = nn.Sequential(nn.Sequential(Block(8, 8)), nn.Sequential(Block(8, 8)))
        self.outer = nn.Sequential(Nest(), Nest())
        self.own = Reversed(Block(8, 8), Block(8, 8))
        self.one_by_one = nn.Sequential(Block(8, 8), Block(8, 8))

    def forward(self, x):
        x = self.own(self.outer(self.nested(self.runs(self.layers(x)))))
        return self.one_by_one[1](self.one_by_one[0](x))


@pytest.mark.parametrize("variant", ["MRLALight", "MRLABase"])
def test_runs_are_told_from_what_is_none_and_have_a_memory_each(variant):
    plain = Network()
    assert find_runs(plain, 3) == [
        ("runs", range(2), 8, True),
        ("runs", range(2, 4), 16, False),
        ("outer", range(2), 8, True),
    ]
    network = randomize(build(Network, layer_attention=dict(type=variant))).double()
    names = {name for name, _ in network.named_modules() if name.endswith(".mrla")}
    assert names == {*(f"runs.{index}.mrla" for index in range(4)), "outer.0.mrla", "outer.1.mrla"}
    found = network.runs(IMAGE.double().new_ones(2, 8, 9, 7))
    x, memory = IMAGE.double().new_ones(2, 8, 9, 7), ()
    for index, block in enumerate(network.runs):
        out = block(x)
        if index < 4:
            shortcut = x if index != 2 else None
            out, *memory = block.mrla(out, shortcut, *(memory if index != 2 else ()))
        x = out
    torch.testing.assert_close(found, x)
    start = IMAGE.double().new_ones(2, 8, 9, 7)
    torch.testing.assert_close(network.runs[2:](network.runs[:2](start)), found)


def test_stages_choose_and_frozen_ones_stay_frozen():
    backbone = build("mmdet.CSPNeXt", stages="stage.*", frozen_stages=2, **CSP)
    assert len(branches(backbone)) == 4
    names = [key for key, parameter in backbone.named_parameters() if parameter.requires_grad]
    assert {key.split(".")[0] for key in names if ".mrla." in key} == {"stage3"}


def test_norms_are_those_of_the_backbone_or_given_to_the_branches():
    convnext = build("mmpretrain.ConvNeXt", **CONVNEXT)
    assert isinstance(branches(convnext)[0].norm, nn.LayerNorm)
    norms = [dict(type="GN", num_groups=2), dict(type="BN", eps=0.1)]
    assert isinstance(branches(build(Network, norm_cfg=norms[0]))[0].norm, nn.GroupNorm)
    assert branches(build("mmdet.CSPNeXt", norm_cfg=norms[1], **CSP))[0].norm.eps == 0.1


def test_sync_bn_reaches_the_branches():
    """With frozen statistics the converted model computes the same; others need a GPU."""
    backbone = randomize(build("mmdet.CSPNeXt", norm_eval=True, **CSP)).double().train()
    expected = levels(backbone, IMAGE.double())
    converted = convert_sync_batchnorm(backbone, "torch").train()
    assert not [m for m in converted.modules() if type(m) is nn.BatchNorm2d]
    torch.testing.assert_close(levels(converted, IMAGE.double()), expected)


OFFICIAL = (("layers.", "stages."), (".mlp.fc1.", ".ffn.layers.0.0."), (".attn.", ".attn.w_msa."))
OFFICIAL += ((".mlp.fc2.", ".ffn.layers.1."), ("patch_embed.proj.", "patch_embed.projection."))


def test_the_file_of_a_swin_classifier_loads(tmp_path):
    """By its authors' names, without the norms of a detector's levels."""
    options = dict(embed_dims=48, depths=(2, 2, 2, 2))
    plain = randomize(MODELS.build(dict(type="mmdet.SwinTransformer", **options)))
    state = {"head.weight": torch.ones(2, 2), "layers.0.blocks.1.attn_mask": torch.ones(2, 2)}
    for key, value in plain.state_dict().items():
        if not key.startswith("norm"):
            for theirs, ours in OFFICIAL:
                key = key.replace(ours, theirs)
            state[key] = value
    torch.save(dict(model=state), tmp_path / "swin.pth")
    checkpoint = dict(type="Pretrained", checkpoint=str(tmp_path / "swin.pth"))
    init_cfg = [dict(type="Constant", layer="LayerNorm", val=1.0), checkpoint]
    backbone = build("mmdet.SwinTransformer", **options, init_cfg=init_cfg, convert_weights=True)
    backbone.init_weights()
    assert not any(branch.norm.weight.any() for branch in branches(backbone))
    found = backbone.state_dict()
    for key, value in plain.state_dict().items():
        if not key.startswith("norm") and "downsample" not in key:  # mmdet orders these anew
            assert torch.equal(found[key], value), key


FAULTS = {
    "no run": (dict(backbone="mmpretrain.DenseNet", arch="121"), "DenseNet has no run"),
    "no class": (dict(backbone="mmdet.ResNeXt50"), "ResNeXt50"),
    "not plain": (dict(backbone="PVTv2Layout"), "PVTv2Layout"),
    "stages": (dict(backbone="mmdet.CSPNeXt", stages="layer1", **CSP), "stem, stage2.1.blocks"),
    "feature pyramid": (dict(backbone="mmdet.DetectoRS_ResNet", rfp_inplanes=256), "rfp_backbone"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_work_is_refused(fault):
    arguments, words = FAULTS[fault]
    with pytest.raises(InputError, match=words):
        build(arguments.pop("backbone"), **arguments)
