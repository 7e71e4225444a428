"""Methods of others against their formulas, written a second time around our stored weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention import LayerAttentionResidual

from ..attention.stages import assert_same
from ..backbones.common import randomize

FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["train", "frozen"])


def query_and_key(x, own, heads):
    pooled = x.mean((2, 3)).unsqueeze(1)
    return [projection(pooled).view(len(x), heads, -1) for projection in (own.query, own.key)]


def per_head(factor, x):
    return (factor[..., None, None, None] * x.unflatten(1, (factor.shape[1], -1))).flatten(1, 2)


def dsu(x, state, cell):
    i, f, g = (cell.from_input(x.mean((2, 3))) + cell.from_hidden(state[0])).chunk(3, dim=1)
    memory = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return memory.sigmoid(), memory


def dla(x, shortcut, own, first, state):
    """Cell and context are those of the stage's `first` block."""
    state = dsu(x, state or (x.new_zeros(x.shape[:2]),) * 2, first.cell)
    fresh = dsu(shortcut, state, first.cell)[0][..., None, None] * shortcut
    query, key = query_and_key(x, own, heads=2)
    out = per_head(((query * key).sum(2) / math.sqrt(32)).sigmoid(), own.value(x))
    return out + own.history_scale.view(-1, 1, 1) * (fresh + first.context(shortcut)), state


def kcla(x, shortcut, own, first, state):
    """The authors' sums: of weighted maps and of weights, divided at the end."""
    query, key = query_and_key(x, own, heads=4)
    length = key.norm(dim=2)
    slope = torch.linspace(math.log(0.7), -math.log(0.7), 4, dtype=x.dtype).exp()
    weight = (slope * length).clamp(max=10).exp()
    maps, total = state or (0, 0)
    maps, total = maps + per_head(weight, x), total + weight
    gate = own.mix((query * key).sum(2) / length.clamp(min=1e-12)).sigmoid()  # 0.5 for a zero key
    return per_head(gate / (total + 1e-3), own.value(maps)), (maps, total)


@FROZEN
@pytest.mark.parametrize(("batch", "drop_path"), [(2, 0.0), (3, 0.0), (3, 0.4)])
@pytest.mark.parametrize("method", [dla, kcla])
def test_stage(method, batch, drop_path, frozen):
    """Of three images, the first's keys exceed KCLA's cap (10) by far; the last's are zero."""
    torch.manual_seed(0)
    config = dict(type="DLALight") if method is dla else dict(type="KCLA", head_channels=16)
    options = dict(norm_cfg=dict(type="BN"), drop_path=drop_path, zero_init=False)
    blocks = nn.ModuleList(
        LayerAttentionResidual(config, 64, first_in_stage=first, **options)
        for first in (True, False, False)
    )
    randomize(blocks).double().train()
    for block in blocks:
        block.norm.train(not frozen)
    *outs, shortcut = (torch.randn(4, batch, 64, 5, 7) + torch.randn(4, batch, 64, 1, 1)).double()
    if batch == 3:
        scale, bias = torch.tensor([[100, 1, 0], [0, 0, -1000]]).view(2, 3, 1, 1, 1)
        outs = [out * scale + bias for out in outs]
    leaves = {f"out{index}": out.requires_grad_() for index, out in enumerate(outs)}
    leaves |= dict(shortcut=shortcut.requires_grad_()) | dict(blocks.named_parameters())

    def run(images=slice(None)):
        torch.manual_seed(2)
        y, memory = shortcut[images], ()
        for block, out in zip(blocks, outs, strict=True):
            y, *memory = block.forward_add_relu(out[images], y, nn.ReLU(), *memory)
            yield y

    def run_reference():
        torch.manual_seed(2)
        y, state = shortcut, None
        for block, out in zip(blocks, outs, strict=True):
            x = (out + y).relu()
            out, state = method(x, y, block.attention, blocks[0].attention, state)
            branch = block.norm(out).relu() if method is kcla else block.norm(out)
            dropped = torch.rand(batch, 1, 1, 1, dtype=x.dtype) < drop_path
            y = x + torch.where(dropped, 0, branch / (1 - drop_path))
            yield y

    grads = assert_same(list(run()), list(run_reference()), leaves)
    assert all(grad.isfinite().all() and (drop_path or grad.any()) for grad in grads.values())
    if frozen and not drop_path:  # an image does not see its neighbours
        assert_same([y[1:2] for y in run()], list(run(slice(1, 2))), leaves)


def rla(backbone, image):
    """RLA_g as its authors run it: what the hidden state takes in is a block's output."""
    x = F.max_pool2d(backbone.bn1(backbone.conv1(image)).relu(), 3, 2, 1)
    hidden = x.new_zeros(len(x), 32, *x.shape[2:])
    for stage in (backbone.layer1, backbone.layer2):
        for index, block in enumerate(stage):
            out = block.bn1(block.conv1(x) + block.mrla.read(hidden)).relu()
            out = block.bn3(block.conv3(block.bn2(block.conv2(out)).relu()))
            x = (out + (x if index else block.downsample(x))).relu()
            if stage is backbone.layer2 and index == 0:
                hidden = F.avg_pool2d(hidden, 2, ceil_mode=True)
            hidden = block.mrla.norm(hidden + stage[0].mrla.write(x))
            hidden = stage[0].mrla.recurrent(hidden.tanh())
        yield x
    yield backbone.out_norm(hidden).relu()


@FROZEN
def test_rla_g(frozen):
    torch.manual_seed(0)
    options = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    config = dict(type="RLAResNet", depth=50, base_channels=8, out_hidden=True, **options)
    backbone = randomize(MODELS.build(config | dict(norm_eval=frozen))).double().train()
    image = torch.randn(3, 3, 33, 50).double().requires_grad_()
    first, last, hidden = rla(backbone, image)
    leaves = dict(image=image) | dict(backbone.named_parameters())
    grads = assert_same(backbone(image), [first, torch.cat([last, hidden], 1)], leaves)
    silent = {name for name, grad in grads.items() if not grad.any()}
    assert silent == {"layer1.0.mrla.read.weight"}  # the hidden state starts at zero
