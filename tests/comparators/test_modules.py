"""Each attention module against its equation written anew, values and gradients."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.comparators import A2, AA, BA, CBAM, DIA, ECA, SE, DLALight
from mrla_mm.errors import InputError

from ..attention.stages import assert_same
from ..backbones.common import assert_same_with_gradients, randomize


def gated(x, logits):
    return torch.einsum("bchw,bc->bchw", x, 1 / (1 + (-logits).exp()))


def two_layers(y, a, b):
    y = (y @ a.weight.T + (0 if a.bias is None else a.bias)).clamp(min=0)
    return y @ b.weight.T + (0 if b.bias is None else b.bias)


def se(module, x):
    return gated(x, two_layers(x.flatten(2).sum(2) / 15, module.squeeze, module.excite))


def eca(module, x):
    taps, padded = module.conv.weight.flatten(), F.pad(x.mean((2, 3)), [1, 1])
    return gated(x, sum(taps[j] * padded[:, j : j + 8] for j in range(3)))


def cbam(module, x):
    pooled = [x.mean((2, 3)), x.flatten(2).max(2)[0]]
    x = gated(x, sum(two_layers(y, module.mlp[0], module.mlp[2]) for y in pooled))
    maps = F.pad(torch.stack([x.sum(1) / 8, x.max(1)[0]], 1), [3] * 4)
    logits = 0
    for m, i, j in itertools.product(range(2), range(7), range(7)):
        logits = logits + module.conv.weight[0, m, i, j] * maps[:, m, i : i + 3, j : j + 5]
    return x / (1 + (-logits[:, None]).exp())


def a2(module, x):
    a, b, v = (conv(x).flatten(2) for conv in (module.features, module.gather, module.distribute))
    z = torch.einsum("bcn,bmn,bmi->bci", a, b.softmax(2), v.softmax(1))
    return x + module.out(z.unflatten(2, (3, 5)))


def aa(module, x):
    pooled = F.avg_pool2d(x, 3, module.stride, padding=1) if module.stride > 1 else x
    parts = [part.chunk(8, 1) for part in module.qkv(pooled).split(module.sizes, 1)]
    pixels = list(itertools.product(*map(range, pooled.shape[2:])))
    outs, zero = [], module.max_grid - 1
    for q, k, v in zip(*parts, strict=True):
        out = torch.zeros_like(v)
        for i, j in pixels:
            scores = []
            for y, u in pixels:
                key = k[..., y, u] + module.rows[y - i + zero] + module.columns[u - j + zero]
                scores.append((q[..., i, j] * key).sum(1) / q.shape[1] ** 0.5)
            weights = torch.stack(scores, 1).softmax(1)
            out[..., i, j] = torch.einsum("bn,bcn->bc", weights, v.flatten(2))
        outs.append(out)
    return torch.cat([module.conv(x), module.out(torch.cat(outs, 1))], 1)


CASES = {
    "SE": (lambda: SE(8, reduction=3), se),
    "ECA": (lambda: ECA(8), eca),
    "CBAM": (lambda: CBAM(8, reduction=2), cbam),
    "A2": (lambda: A2(8), a2),
    "AA": (lambda: AA(8, 160, 3, padding=1, max_grid=5), aa),
    "AA, stride": (lambda: AA(8, 160, 3, stride=2, padding=1, max_grid=3), aa),
}


@pytest.mark.parametrize("name", CASES)
def test_plugins(name):
    make, reference = CASES[name]
    module, x = randomize(make()).double(), torch.randn(2, 8, 3, 5).double().requires_grad_()
    assert_same_with_gradients([module(x)], [reference(module, x)], [x, *module.parameters()])


def test_bridge_attention():
    module = randomize(BA(8, reduction=4)).double()
    maps = [torch.randn(3, c, n, n).double().requires_grad_() for c, n in ((2, 6), (2, 3), (8, 3))]
    bridged = 0
    for (linear, norm), x in zip(module.squeeze, maps, strict=True):
        s = x.mean((2, 3)) @ linear.weight.T
        s = (s - s.mean(0)) / (s.var(0, unbiased=False) + norm.eps) ** 0.5
        bridged = bridged + s * norm.weight + norm.bias
    expected = gated(maps[2], bridged.clamp(min=0) @ module.excite.weight.T)
    leaves = [*maps, *module.parameters()]
    assert_same_with_gradients([module(maps[2], maps[:2])], [expected], leaves)


def test_dia_is_an_lstm_along_the_stage():
    layers = [DIA(6, reduction=2, first_in_stage=t == 0).double() for t in range(3)]
    assert [len(list(layer.parameters())) for layer in layers] == [8, 0, 0]
    lstm = randomize(layers[0].lstm)
    maps = [torch.randn(2, 6, 3, 4).double().requires_grad_() for _ in layers]
    outs, expected, memory = [], [], ()
    hidden = cell = torch.zeros(2, 6).double()
    for layer, x in zip(layers, maps, strict=True):
        out, memory = layer(x, None, memory)
        outs.append(out)
        gates = two_layers(x.mean((2, 3)), *lstm.from_input[::2])
        gates = gates + two_layers(hidden, *lstm.from_hidden[::2])
        i, f, g, o = gates.unflatten(1, (4, 6)).unbind(1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.sigmoid()
        expected.append(torch.einsum("bchw,bc->bchw", x, hidden))
    assert_same_with_gradients(outs, expected, [*maps, *lstm.parameters()])


@pytest.mark.parametrize("kind", [LayerAttentionResidual, TokenAttentionResidual])
def test_an_activation_needs_a_norm_that_does_not_start_at_zero(kind):
    cfg = dict(type="mrla_mm.KCLA", head_channels=4)
    options = dict(norm_cfg=dict(type="BN" if kind is LayerAttentionResidual else "LN"))
    with pytest.raises(InputError, match="zero_init_attention=False"):
        kind(cfg, 8, **options)
    branch = kind(cfg, 8, zero_init=False, **options).eval()
    x = torch.randn(2, 8, 3, 4) if kind is LayerAttentionResidual else torch.randn(2, 12, 8)
    args = (x, None) if kind is LayerAttentionResidual else (x, x, (3, 4))
    nn.init.normal_(branch.attention.value.weight)
    assert ((branch(*args)[0] - x) >= 0).all()


WRONG = {
    "reduction=65": lambda: DLALight(64, reduction=65, first_in_stage=True),
    "reduction=9": lambda: SE(8, reduction=9),
    "max_grid=4": lambda: AA(8, 64, 3, padding=1, max_grid=4)(torch.rand(1, 8, 4, 5)),
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments_name_themselves(named):
    with pytest.raises(InputError, match=named):
        WRONG[named]()


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
    state = dsu(x, state or (x.new_zeros(x.shape[:2]),) * 2, first.cell)
    fresh = dsu(shortcut, state, first.cell)[0][..., None, None] * shortcut
    query, key = query_and_key(x, own, heads=2)
    out = per_head(((query * key).sum(2) / math.sqrt(32)).sigmoid(), own.value(x))
    return out + own.history_scale.view(-1, 1, 1) * (fresh + first.context(shortcut)), state


def kcla(x, shortcut, own, first, state):
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
    config = (
        dict(type="mrla_mm.DLALight")
        if method is dla
        else dict(type="mrla_mm.KCLA", head_channels=16)
    )
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
            y, *memory = block((out[images] + y).relu(), y, *memory)
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
    config = dict(
        type="mrla_mm.RLAResNet", depth=50, base_channels=8, out_hidden=True, out_indices=(0, 1)
    )
    backbone = randomize(MODELS.build(config | dict(norm_eval=frozen))).double().train()
    image = torch.randn(3, 3, 33, 50).double().requires_grad_()
    first, last, hidden = rla(backbone, image)
    leaves = dict(image=image) | dict(backbone.named_parameters())
    grads = assert_same(backbone(image), [first, torch.cat([last, hidden], 1)], leaves)
    silent = {name for name, grad in grads.items() if not grad.any()}
    silent -= {name for name in silent if name.startswith(("layer3", "layer4"))}  # not run
    assert silent == {"layer1.0.mrla.read.weight"}  # the hidden state starts at zero
