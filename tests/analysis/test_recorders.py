"""Recorded weights and queries are those the layers used: weights and values give the output."""

import pytest
import torch
from torch import nn

from mrla_mm.analysis.layer_attention import LayerAttentionRecorder
from mrla_mm.analysis.query_similarity import QueryRecorder
from mrla_mm.attention import MRLALight
from mrla_mm.attention.tokens import to_map
from mrla_mm.backbones import MRLAResNet, MRLAViT
from mrla_mm.errors import InputError
from mrla_mm.functional import global_average
from tests.backbones.common import randomize_zero_init


def resnet(variant, **arguments):
    attention = dict(type=variant, head_channels=4, **arguments)
    torch.manual_seed(0)
    stages = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    widths = dict(base_channels=8, stem_channels=8)
    model = MRLAResNet(18, attention, norm_eval=False, **widths, **stages)
    for key, statistics in model.named_buffers():
        if key.endswith("running_var"):
            statistics.uniform_(0.5, 2)
    return randomize_zero_init(model).double().eval()


def vit(variant, **arguments):
    arch = dict(embed_dims=16, num_layers=6, num_heads=2, feedforward_channels=32)
    attention = dict(type=variant, head_channels=8, **arguments)
    torch.manual_seed(0)
    model = MRLAViT(arch, attention, img_size=32, patch_size=8, stage_blocks=3, out_type="featmap")
    return randomize_zero_init(model).double().eval()


def record(model, picture):
    given, outs = {}, {}
    with torch.no_grad(), LayerAttentionRecorder(model) as recorder:
        for name, branch in recorder.branches.items():

            def keep(branch, args, name=name):
                given[name] = args

            def keep_out(attention, args, result, name=name):
                outs[name] = args[0], result[0]

            recorder.callback(branch.register_forward_pre_hook(keep).remove)
            recorder.callback(branch.attention.register_forward_hook(keep_out).remove)
        model(picture)
    return recorder, recorder.branches, given, outs


@pytest.fixture
def picture():
    return torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def applied(recorder, branches, outs, stage, index, from_own=False):
    total = 0
    for weight, name in zip(recorder.last[stage[index]], stage, strict=False):
        # MLA's layers make the values of earlier layers with their own convolution
        maker = branches[stage[index] if from_own else name].attention
        total = total + weight * maker.project_value(outs[name][0])
    return total


@pytest.mark.parametrize("build", [resnet, vit])
@pytest.mark.parametrize("variant", ["MRLABase", "MLA", "LinearRLA", "output", "none"])
@torch.no_grad()
def test_weights_give_the_output(build, variant, picture):
    is_light = variant in ("output", "none")
    model = build("MRLALight", previous=variant) if is_light else build(variant)
    recorder, branches, _, outs = record(model, picture)
    for stage in recorder.stages():
        if not is_light:
            sums = stage.weights.nansum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums))
            assert stage.weights.isnan().equal(torch.ones_like(stage.weights).triu(1).bool())
            assert stage.weights[:, -1].std() > 1e-3, "uniform weights would prove nothing"
        for index, name in enumerate(stage.layers):
            own = variant == "MLA"
            found = applied(recorder, branches, outs, stage.layers, index, from_own=own)
            torch.testing.assert_close(found, outs[name][1])
    earlier = stage.weights[:, -1, :-1]
    assert (earlier.abs().max() > 1e-3) == (variant != "none")


@torch.no_grad()
def test_implied_weights_through_the_shortcut_of_a_resnet(picture):
    recorder, branches, given, outs = record(resnet("MRLALight"), picture)
    for stage in recorder.stages():
        shortcut = given[stage.layers[0]][1]
        for index, name in enumerate(stage.layers):  # rest: the output if all values were zero
            rest = branches[name].attention.history_scale[:, None, None] * shortcut
            shortcut = given[name][0] + branches[name].norm(rest)
            found = applied(recorder, branches, outs, stage.layers, index) + rest
            torch.testing.assert_close(found, outs[name][1])
        assert recorder.last[stage.layers[1]][0].abs().min() > 1e-4, "nothing was passed on"


@torch.no_grad()
def test_implied_weights_through_the_shortcut_of_a_vit(picture):
    recorder, branches, given, outs = record(vit("MRLALight"), picture)
    for stage in recorder.stages():
        passed_on = 0  # what the values made of the last layer's output
        for index, name in enumerate(stage.layers):
            branch, (_, shortcut, grid, *_) = branches[name], given[name]
            norm, scale = branch.history_norm, branch.attention.history_scale[:, None, None]
            factor = (norm(shortcut) - norm.bias) / (shortcut - shortcut.mean(-1, keepdim=True))
            rest = to_map(norm(shortcut)[:, 1:], grid) - to_map(factor[:, 1:], grid) * passed_on
            passed_on = applied(recorder, branches, outs, stage.layers, index)
            torch.testing.assert_close(passed_on + scale * rest, outs[name][1])
        assert recorder.last[stage.layers[1]][0].abs().max() > 1e-2, "nothing was passed on"


@torch.no_grad()
def test_means_over_images(picture):
    model = resnet("MRLABase")
    alone = []
    for image in picture.split(1):
        with LayerAttentionRecorder(model) as recorder:
            model(image)
        alone.append(recorder.stages()[1].weights)
    with LayerAttentionRecorder(model) as recorder:
        for image in picture.split(1):
            model(image)
    torch.testing.assert_close(recorder.stages()[1].weights, sum(alone) / 2, equal_nan=True)
    assert (alone[0] - alone[1]).nan_to_num().abs().max() > 1e-6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_variant_whose_weights_are_unknown_is_refused():
    with pytest.raises(InputError, match="Conv2d"):
        LayerAttentionRecorder(nn.Conv2d(3, 3, 1))

    class Own(MRLALight):
        def forward(self, x, shortcut, memory=()):
            return x, None

    with pytest.raises(InputError, match="Own"):
        LayerAttentionRecorder(nn.ModuleList([resnet(Own), resnet("MLA")]))


def test_statistics_of_the_batch_are_refused(picture):
    with pytest.raises(InputError, match="BatchNorm2d"):
        record(resnet("MRLALight").train(), picture)


def record_queries(model, picture):
    with torch.no_grad(), QueryRecorder(model) as recorder:
        for image in picture.split(1):
            model(image)
    return recorder


@pytest.mark.parametrize("variant", ["MRLALight", "MRLABase", "LinearRLA", "MLA"])
@pytest.mark.parametrize(("build", "depth"), [(resnet, 2), (vit, 3)])
def test_similarities_are_those_of_the_queries(build, depth, variant, picture):
    model, queries = build(variant), []
    with torch.no_grad(), QueryRecorder(model) as recorder:
        for branch in recorder.branches.values():

            def keep(attention, args, out):
                queries.append(attention.project_query(global_average(args[0])))

            recorder.callback(branch.attention.register_forward_hook(keep).remove)
        model(picture)
    for stage, start in zip(record_queries(model, picture).stages(), (0, depth), strict=True):
        assert stage.first == 2 and len(stage.layers) == depth - 1
        for index in range(1, depth):
            last, this = queries[start + index - 1], queries[start + index]
            cosine = (last * this).sum(-1) / (last.norm(dim=-1) * this.norm(dim=-1))
            torch.testing.assert_close(stage.values[:, index - 1], cosine.abs().float())
        assert stage.values.std() > 0.01, "queries that are all alike would prove nothing"
    assert not any(module._forward_hooks for module in model.modules())


def test_pairs_with_the_first_layer_can_be_left_out(picture):
    recorder = record_queries(vit("MRLABase"), picture)
    for whole, part in zip(recorder.stages(), recorder.stages(skip_first=True), strict=True):
        assert part.layers == whole.layers[1:] and part.first == 3
        assert part.values.equal(whole.values[:, 1:])
    with pytest.raises(InputError, match="3 layers"):
        record_queries(resnet("MRLABase"), picture).stages(skip_first=True)
