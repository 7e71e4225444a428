"""Each attention module against its equation written as plain loops: values, and gradients of inputs and parameters."""

import pytest
import torch
import torch.nn.functional as F

from mrla_mm.comparators import A2, AA, BA, CBAM, DIA, ECA, SE
from mrla_mm.errors import InputError

from ..backbones.common import assert_same_with_gradients, randomize


def sigmoid_gate(x, logits):
    return torch.stack([x[b, c] * torch.sigmoid(logits[b][c]) for b in range(len(x)) for c in range(x.shape[1])])


def se(module, x):
    pooled = [each.mean((1, 2)) for each in x]
    return sigmoid_gate(x, [module.excite.weight @ (module.squeeze.weight @ y).relu() for y in pooled])


def eca(module, x):
    (weight,) = module.conv.weight[0]
    reach, logits = len(weight) // 2, torch.zeros(x.shape[:2]).to(x)
    for c in range(x.shape[1]):
        near = range(max(c - reach, 0), min(c + reach + 1, x.shape[1]))
        logits[:, c] = sum(weight[other - c + reach] * x[:, other].mean((1, 2)) for other in near)
    return sigmoid_gate(x, logits)


def cbam(module, x):
    first, _, second = module.mlp
    layers = [lambda y: second.weight @ (first.weight @ y + first.bias).relu() + second.bias] * 2
    pooled = [(each.mean((1, 2)), each.flatten(1).max(1).values) for each in x]
    x = sigmoid_gate(x, [sum(mlp(y) for mlp, y in zip(layers, both, strict=True)) for both in pooled]).view_as(x)
    maps, size = torch.stack([x.mean(1), x.max(1).values], 1), module.conv.kernel_size[0]
    padded = F.pad(maps, [size // 2] * 4)
    windows = [[padded[:, :, i : i + size, j : j + size] for j in range(x.shape[3])] for i in range(x.shape[2])]
    gates = [[(window * module.conv.weight).sum((1, 2, 3)).sigmoid() for window in row] for row in windows]
    return x * torch.stack([torch.stack(row, -1) for row in gates], -2)[:, None]


def a2(module, x):
    a, b, v = (conv(x).flatten(2) for conv in (module.features, module.gather, module.distribute))
    z = torch.zeros_like(a)
    for i in range(a.shape[2]):
        for m in range(b.shape[1]):
            descriptor = sum(b[:, m].softmax(1)[:, n, None] * a[:, :, n] for n in range(a.shape[2]))
            z[:, :, i] += v[:, :, i].softmax(1)[:, m, None] * descriptor
    return x + module.out(z.view(*a.shape[:2], *x.shape[2:]))


def aa(module, x):
    """One query pixel after the other."""
    pooled = F.avg_pool2d(x, 3, module.stride, padding=1) if module.stride > 1 else x
    query, key, value = module.qkv(pooled).split(module.sizes, 1)
    height, width = query.shape[2:]
    heads, pixels = [], [(i, j) for i in range(height) for j in range(width)]
    for q, k, v in zip(*(each.chunk(module.heads, 1) for each in (query, key, value)), strict=True):
        out, zero = torch.zeros_like(v), module.max_grid - 1
        for i, j in pixels:
            near = [module.rows[y - i + zero] + module.columns[u - j + zero] for y, u in pixels]
            logits = [(q[..., i, j] * (k[..., y, u] + r)).sum(1) for (y, u), r in zip(pixels, near, strict=True)]
            weights = (torch.stack(logits, 1) / q.shape[1] ** 0.5).softmax(1)
            out[..., i, j] = sum(weights[:, n, None] * v[..., y, u] for n, (y, u) in enumerate(pixels))
        heads.append(out)
    return torch.cat([module.conv(x), module.out(torch.cat(heads, 1))], 1)


CASES = {
    "SE": (lambda: SE(8, reduction=3), se),
    "ECA": (lambda: ECA(8, kernel_size=5), eca),
    "CBAM": (lambda: CBAM(8, reduction=2, kernel_size=3), cbam),
    "A2": (lambda: A2(8), a2),
    "AA": (lambda: AA(8, 16, 3, padding=1, heads=2, value_ratio=0.25, max_grid=5), aa),
    "AA, stride": (lambda: AA(8, 16, 3, stride=2, padding=1, heads=2, value_ratio=0.25, max_grid=3), aa),
}


@pytest.mark.parametrize("name", CASES)
def test_plugins(name):
    make, reference = CASES[name]
    module, x = randomize(make()).double(), torch.randn(2, 8, 3, 5).double().requires_grad_()
    out = module(x)
    expected = reference(module, x).view_as(out)
    assert not torch.allclose(out[:, :8, :2], x[:, :8, :2, : out.shape[3]])
    assert_same_with_gradients([out], [expected], [x, *module.parameters()])


def test_bridge_attention():
    """Gates from three maps of two resolutions, each behind a batch norm of its own."""
    module = randomize(BA(8, reduction=4)).double()
    maps = [torch.randn(3, c, n, n).double().requires_grad_() for c, n in ((2, 6), (2, 3), (8, 3))]
    bridged = 0
    for (linear, norm), x in zip(module.squeeze, maps, strict=True):
        s = torch.stack([linear.weight @ each.mean((1, 2)) for each in x])
        s = (s - s.mean(0)) / (s.var(0, unbiased=False) + norm.eps) ** 0.5
        bridged = bridged + s * norm.weight + norm.bias
    expected = sigmoid_gate(maps[2], bridged.relu() @ module.excite.weight.T)
    out = module(maps[2], maps[:2])
    assert_same_with_gradients([out], [expected.view_as(out)], [*maps, *module.parameters()])


def test_dia_is_an_lstm_along_the_stage():
    layers = [DIA(6, reduction=2, first_in_stage=t == 0).double() for t in range(3)]
    lstm, maps = randomize(layers[0].lstm), [torch.randn(2, 6, 3, 4).double().requires_grad_() for _ in layers]
    assert [sum(p.numel() for p in layer.parameters()) > 0 for layer in layers] == [True, False, False]
    outs, expected, memory, hidden, cell = [], [], None, torch.zeros(2, 6).double(), torch.zeros(2, 6).double()
    for layer, x in zip(layers, maps, strict=True):
        out, memory = layer(x, None, memory)
        outs.append(out)
        both = ((lstm.from_input, x.mean((2, 3))), (lstm.from_hidden, hidden))
        gates = sum((y @ a.weight.T + a.bias).relu() @ b.weight.T + b.bias for (a, _, b), y in both)
        i, f, g, o = gates[:, :6], gates[:, 6:12], gates[:, 12:18], gates[:, 18:]
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.sigmoid(cell)
        expected.append(sigmoid_gate(x, hidden.logit()).view_as(x))
    assert_same_with_gradients(outs, expected, [*maps, *lstm.parameters()])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SE(8, reduction=9), "reduction=9"),
        (lambda: BA(8, reduction=0), "reduction=0"),
        (lambda: DIA(8, reduction=16, first_in_stage=True), "reduction=16"),
        (lambda: ECA(8, kernel_size=4), "kernel_size=4"),
        (lambda: CBAM(8, reduction=2, kernel_size=6), "kernel_size=6"),
        (lambda: AA(8, 8, 3, value_ratio=1.0), "value_ratio=1.0"),
        (lambda: AA(8, 64, 3, padding=1, max_grid=4)(torch.rand(1, 8, 4, 5)), "max_grid=4"),
    ],
)
def test_wrong_arguments_name_themselves(make, named):
    with pytest.raises(InputError, match=named):
        make()
