"""Layer attention in backbones of mmdet, mmpretrain and timm, found by what their blocks do."""

import copy
import pickle
from functools import partial

import pytest
import torch
from mmengine.model import BaseModule, convert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mrla_mm.attention import TokenAttentionResidual
from mrla_mm.attention.tokens import to_map, to_tokens
from mrla_mm.backbones.runs import find_runs
from mrla_mm.errors import InputError

from .common import assert_equal, branches, gradients, load_plain, randomize
from .small_hosts import ARGUMENTS, CSP

IMAGE = torch.rand(2, 3, 128, 160)


@pytest.fixture(autouse=True)
def scope():
    yield
    init_default_scope("mmengine")


def build(name, **kwargs):
    return MODELS.build(dict(type="WithLayerAttention", backbone=name, **kwargs))


def test_no_state_of_a_run_is_lost_in_a_copy():
    backbone = randomize(build("mmdet.CSPNeXt", layer_attention="MRLABase", **CSP)).eval()
    with torch.no_grad():
        for other in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
            assert_equal(other(IMAGE), backbone(IMAGE))


def test_looking_for_runs_changes_nothing():
    backbone = MODELS.build(dict(type="mmdet.CSPNeXt", **CSP))
    state = copy.deepcopy(backbone.state_dict())
    swin = MODELS.build(dict(type="mmdet.SwinTransformer", embed_dims=48))  # has drop path
    random_state = torch.get_rng_state()
    assert [len(run.blocks) for run in find_runs(swin)] == [2, 2, 6, 2]
    channels = {run.name: run.blocks[0].channels for run in find_runs(backbone)}
    assert channels == {"stem": 8, "stage2.1.blocks": 32, "stage3.1.blocks": 64}
    assert torch.equal(torch.get_rng_state(), random_state) and backbone.training
    assert_equal(backbone.state_dict().values(), state.values())
    assert not any(module._forward_hooks for module in backbone.modules())


class Block(nn.Module):
    def __init__(self, taken, returned):
        super().__init__()
        self.conv = nn.Conv2d(taken, returned, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(returned, 1, 1, 1))

    def forward(self, x):
        return self.conv(x).tanh() * self.scale[:, 0]


class OtherBlock(Block):
    pass


class Fusible(Block):
    def fuse(self):
        return self.conv


class OverwritingBlock(Block):
    def forward(self, x):
        return super().forward(x.relu_())


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Block(8, 8), Block(8, 8))

    def forward(self, x):
        return self.inner(x)


class Reversed(nn.Sequential):
    def forward(self, x):
        return super().forward(-x)


class LastBlock(Block):
    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class TokenBlock(Block):
    def forward(self, x, *grid, size=None):
        return to_tokens(super().forward(to_map(x, size or grid)))


class Network(BaseModule):
    """Runs in containers of all kinds, and what is none: layers, repeats, siblings."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
        others = OtherBlock(8, 16), OtherBlock(16, 16)
        self.runs = nn.Sequential(Block(8, 8), Block(8, 8), *others, Block(16, 8))
        self.runs[0].fuse = nn.Identity()  # a part of this name is no method
        self.nested = nn.Sequential(nn.Sequential(Block(8, 8)), nn.Sequential(Block(8, 8)))
        self.outer = nn.Sequential(Nest(), Nest())
        self.own = Reversed(Block(8, 8), Block(8, 8))
        self.one_by_one = nn.Sequential(Block(8, 8), Block(8, 8))
        self.last = nn.ModuleList([nn.ModuleList([LastBlock(8, 8), LastBlock(8, 8)])])
        self.tokens = nn.ModuleList([TokenBlock(8, 8), TokenBlock(8, 8)])
        self.again = nn.ModuleList(self.tokens)  # lists the same blocks
        self.tied = nn.Sequential(*[Block(8, 8), Block(8, 8)] * 2)
        self.patched = nn.Sequential(Block(8, 8), nn.Identity(), Block(8, 8), Block(8, 8))
        self.patched[3].forward = self.patched[3].forward  # on the object
        self.side_by_side = nn.ModuleList([Block(8, 8), Block(8, 8)])
        self.fusible = nn.Sequential(Fusible(8, 8), Fusible(8, 8))
        self.overwriting = nn.Sequential(OverwritingBlock(8, 8), OverwritingBlock(8, 8))
        self.child1, self.child2 = Block(8, 8), Block(8, 8)

    def forward(self, x):
        x = self.overwriting(self.patched(self.fusible(self.layers(x))))
        x = self.own(self.outer(self.nested(self.runs(x))))
        x = self.tied(self.one_by_one[1](self.one_by_one[0](x)))
        x = sum(block(x) for block in self.side_by_side)
        x, grid = x.permute(0, 2, 3, 1), x.shape[2:]
        for block in self.last[0]:
            x = block(x)
        x = x.flatten(1, 2)
        x = self.tokens[1](self.tokens[0](x, *grid), size=grid)
        return self.child2(self.child1(to_map(x, grid)))


LIGHT_8 = dict(type="MRLALight", head_channels=8)
RUNS = {  # layout, channels, shape kept by the first block, caller
    ("runs.0", "runs.1"): ("maps", 8, True, "runs"),
    ("runs.2", "runs.3"): ("maps", 16, False, "runs"),
    ("outer.0", "outer.1"): ("maps", 8, True, "outer"),
    ("own.0", "own.1"): ("maps", 8, True, "own"),
    ("one_by_one.0", "one_by_one.1"): ("maps", 8, True, ""),
    ("last.0.0", "last.0.1"): ("maps, channels last", 8, True, ""),
    ("tokens.0", "tokens.1"): ("tokens", 8, True, ""),
    ("child1", "child2"): ("maps", 8, True, ""),
}


@pytest.mark.parametrize("size", [None, (64, 48), (16, 14)])  # 8 x 16 pixels look like channels too
def test_runs_are_told_from_what_is_none(size):
    found = {}
    for run in find_runs(Network(), size=size):
        first = run.blocks[0]
        facts = first.layout, first.channels, first.keeps_shape, first.caller
        found[tuple(block.name for block in run.blocks)] = facts
    assert found == RUNS


def attend(branch, out, x, grid):
    """What a block returns with a branch behind it, whatever the layout of its maps."""
    if isinstance(branch, TokenAttentionResidual):
        return branch(out, x, grid)[0]
    if branch.attention.channels != out.shape[1]:  # channels last
        out, x = (each.permute(0, 3, 1, 2) for each in (out, x))
        return (out + branch.norm(branch.attention(out, x)[0])).permute(0, 2, 3, 1)
    shortcut = x if branch.has_shortcut else None
    return out + branch.norm(branch.attention(out, shortcut)[0])


def test_each_block_has_its_branch_behind_it():
    network = randomize(build(Network, layer_attention=LIGHT_8)).double().eval()
    plain = load_plain(Network().double(), network)
    calls = {}

    def record(name, block, args, kwargs, returned):
        calls[name] = args, kwargs, returned

    for name, block in network.named_modules():
        if "mrla" in block._modules:
            block.register_forward_hook(partial(record, name), with_kwargs=True)
    with torch.no_grad():
        network(torch.rand(2, 3, 5, 7).double())
        assert calls.keys() == {block.name for run in find_runs(plain) for block in run.blocks}
        for name, (args, kwargs, found) in calls.items():
            out = plain.get_submodule(name)(*args, **kwargs)
            branch = network.get_submodule(f"{name}.mrla")
            assert branch.has_shortcut == (out.shape == args[0].shape)
            torch.testing.assert_close(found, attend(branch, out, args[0], (5, 7)))


def test_a_memory_is_passed_on_within_a_run():
    """The container has two runs and a block behind them."""
    network = randomize(build(Network, layer_attention="MRLABase", stages="runs")).double()
    plain = load_plain(Network().double(), network)
    x = start = torch.ones(2, 8, 9, 7).double()
    memory = ()
    for index, (block, ours) in enumerate(zip(plain.runs, network.runs, strict=True)):
        out = block(x)
        if index < 4:
            out, *memory = ours.mrla(out, x, *(memory if index % 2 else ()))
        x = out
    torch.testing.assert_close(network.runs(start), x)


HORNET = dict(base_dim=16, depths=[2] * 4, orders=[2] * 4)
HORNET["dw_cfg"] = [dict(type="DW", kernel_size=3)] * 4


@pytest.mark.parametrize("name", ["HorNet", "convnext_atto"])
def test_hosts_that_checkpoint_block_by_block_compute_the_same(name):
    """HorNet's with_cp and timm's set_grad_checkpointing go past the containers."""
    options = dict(arch=HORNET) if name == "HorNet" else dict(model_name=name)
    kind = name if name == "HorNet" else "TIMMBackbone"
    backbone = randomize(build(f"mmpretrain.{kind}", **options)).double().train()
    image = IMAGE[..., :64, :96].double()
    torch.manual_seed(0)  # of dropout
    expected = gradients(backbone, image)
    if kind == "HorNet":
        backbone.with_cp = True
    else:
        backbone.timm_model.set_grad_checkpointing()
    torch.manual_seed(0)
    torch.testing.assert_close(gradients(backbone, image), expected)


def test_stages_choose_and_frozen_ones_stay_frozen():
    backbone = build("mmdet.CSPNeXt", stages="stage.*", frozen_stages=2, **CSP)
    assert len(branches(backbone)) == 4
    names = [key for key, parameter in backbone.named_parameters() if parameter.requires_grad]
    assert {key.split(".")[0] for key in names if ".mrla." in key} == {"stage3"}


def test_norms_are_those_of_the_backbone_or_given_to_the_branches():
    convnext = build("mmpretrain.ConvNeXt", arch="atto")
    assert isinstance(branches(convnext)[0].norm, nn.LayerNorm)
    network = build(Network, stages="runs", norm_cfg=dict(type="GN", num_groups=2))
    assert isinstance(branches(network)[0].norm, nn.GroupNorm)
    csp = build("mmdet.CSPNeXt", norm_cfg=dict(type="BN", eps=0.1), **CSP)
    assert branches(csp)[0].norm.eps == 0.1


def test_sync_bn_reaches_the_branches():
    """With frozen statistics: others need a GPU."""
    backbone = randomize(build("mmdet.CSPNeXt", norm_eval=True, **CSP)).double().train()
    expected = backbone(IMAGE.double())
    converted = convert_sync_batchnorm(backbone, "torch").train()
    assert not [m for m in converted.modules() if type(m) is nn.BatchNorm2d]
    torch.testing.assert_close(converted(IMAGE.double()), expected)


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


@pytest.mark.parametrize("host", ["mmpretrain.SwinTransformer", "mmdet.DetectoRS_ResNet"])
def test_files_that_hosts_load_in_their_own_way(host, tmp_path):
    """Swin renames keys of older files and drops tables; DetectoRS does not keep its init_cfg."""
    options = ARGUMENTS[host]
    state = randomize(MODELS.build(dict(type=host, **options))).state_dict()
    file = {f"student.{key.replace('norm3.', 'norm.')}": value for key, value in state.items()}
    file["student.stages.0.blocks.1.attn_mask"] = torch.ones(2, 2)
    torch.save(file, tmp_path / "old.pth")
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "old.pth"), prefix="student")
    backbone = build(host, **options, init_cfg=init_cfg)
    backbone.init_weights()
    found = backbone.state_dict()
    assert_equal([found[key] for key in state], state.values())


MLA = dict(backbone=Network, layer_attention="MLA")
FAULTS = {
    "tokens": (dict(backbone="mmpretrain.VisionTransformer"), "VisionTransformer has no run"),
    "size": (dict(backbone="mmpretrain.LeNet5"), "LeNet5.* 3 channels.*probe_size"),
    "drop path": (dict(backbone="mmdet.CSPNeXt", attention_drop_path=20, **CSP), "drop_path=20"),
    "twice": (dict(backbone="MRLAResNet", depth=18), "already has layer attention"),
    "package": (dict(backbone="mmyolo.YOLOv5CSPDarknet"), "mmyolo.*install its package"),
    "stages": (dict(backbone="mmdet.CSPNeXt", stages="layer1", **CSP), "stem, stage2.1.blocks"),
    "memory": (dict(MLA, stages="last.0"), "MLA.*Network.* that calls last"),
    "one by one": (dict(MLA, stages="one_by_one"), "Network.* that calls one_by_one"),
    "own forward": (dict(MLA, stages="own"), "Reversed.* that calls own"),
    "pyramid": (dict(backbone="mmdet.DetectoRS_ResNet", depth=50, rfp_inplanes=8), "rfp_backbone"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_work_is_refused(fault):
    arguments, words = copy.deepcopy(FAULTS[fault])
    with pytest.raises(InputError, match=words):
        build(arguments.pop("backbone"), **arguments)


def test_a_class_brings_the_scope_of_its_norms():
    mmpretrain = pytest.importorskip("mmpretrain")
    arch = dict(depths=[2, 1, 1, 1], channels=[4, 8, 16, 32])
    host = mmpretrain.models.ConvNeXt
    model = MODELS.build(dict(type="WithLayerAttention", backbone=host, arch=arch))
    assert type(model.stages[0][0].mrla.norm).__name__ == "LayerNorm2d"
