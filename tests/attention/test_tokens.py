"""Layer attention over tokens against Algorithms 2 and 4, spelled out step by step in float64, gradients too."""

import math

import pytest
import torch

from mrla_mm.attention import MRLALight, TokenAttentionResidual
from mrla_mm.errors import InputError

from . import reference

LIGHT, LIGHT_OUTPUT = {"type": "MRLALight"}, {"type": "MRLALight", "previous": "output"}
BASE = {"type": "MRLABase"}
CHANNELS, HEAD_CHANNELS, DEPTH = 32, 16, 3


def normalise(token, weight, bias):
    """LayerNorm of one token (C,), eps 1e-6."""
    mean = sum(token) / len(token)
    variance = sum((value - mean) ** 2 for value in token) / len(token)
    return (token - mean) / torch.sqrt(variance + 1e-6) * weight + bias


def normalise_all(tokens, block, name):
    return [normalise(token, block[f"{name}.weight"], block[f"{name}.bias"]) for token in tokens]


def reshape_to_grid(patches, grid):
    """Patch i * W + j stands at row i, column j: (C, H, W)."""
    height, width = grid
    rows = [torch.stack([patches[i * width + j] for j in range(width)], dim=1) for i in range(height)]
    return torch.stack(rows, dim=1)


def reshape_to_patches(image):
    return [image[:, i, j] for i in range(image.shape[1]) for j in range(image.shape[2])]


def gelu(z):
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def algorithm_4(outputs, inputs, blocks, grid, extra, previous):
    """MRLA-light: per block and image, lines 3 to 18; O^(t-1) is the block's normed input or the last o."""
    kept = [None] * len(outputs[0])
    results = []
    for x, s, block in zip(outputs, inputs, blocks, strict=True):
        images = []
        for b in range(len(x)):
            normed = normalise_all(x[b], block, "norm")
            image = reshape_to_grid(normed[extra:], grid)
            query = reference.project(image, block["attention.query.weight"])
            key = reference.project(image, block["attention.key.weight"])
            value = gelu(reference.depthwise(image, block["attention.value.weight"]))
            count = CHANNELS // HEAD_CHANNELS
            split = [reference.heads(part, count) for part in (query, key, value)]
            gates = [1 / (1 + torch.exp(-reference.score(q, k))) for q, k, _ in zip(*split, strict=True)]
            o = reshape_to_patches(torch.cat([gate * v for gate, v in zip(gates, split[2], strict=True)]))
            history = normalise_all(s[b][extra:], block, "history_norm") if previous == "shortcut" else kept[b]
            if history is not None:
                o = [block["attention.history_scale"] * h + patch for h, patch in zip(history, o, strict=True)]
            kept[b] = o
            images.append(x[b] + torch.stack([*normed[:extra], *o]))
        results.append(torch.stack(images))
    return results


def algorithm_2(outputs, inputs, blocks, grid, extra, previous):
    """MRLA-base: keys and values of the stage's layers are kept, the softmax runs over all of them."""
    keys, values = [[] for _ in outputs[0]], [[] for _ in outputs[0]]
    results = []
    for x, block in zip(outputs, blocks, strict=True):
        images = []
        for b in range(len(x)):
            normed = normalise_all(x[b], block, "norm")
            image = reshape_to_grid(normed[extra:], grid)
            query = reference.project(image, block["attention.query.weight"])
            keys[b].append(reference.project(image, block["attention.key.weight"]))
            values[b].append(reference.depthwise(image, block["attention.value.weight"]))
            o = reference.softmax_attention(query, keys[b], values[b], CHANNELS // HEAD_CHANNELS)
            images.append(x[b] + torch.stack([*normed[:extra], *reshape_to_patches(o)]))
        results.append(torch.stack(images))
    return results


def draw_stage(attention, grid, extra, seed=0):
    """A stage of float64 branches with random parameters, and the output and input tokens of each of its blocks."""
    torch.manual_seed(seed)
    branches = [
        TokenAttentionResidual(attention, CHANNELS, extra_tokens=extra, first_in_stage=t == 0).double()
        for t in range(DEPTH)
    ]
    for branch in branches:
        for parameter in branch.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        for norm in (branch.norm, branch.history_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.bias)  # else pooled features, hence all scores, are close to zero
    shape = (2, extra + grid[0] * grid[1], CHANNELS)
    outputs, inputs = ([torch.randn(shape).double().requires_grad_() for _ in range(DEPTH)] for _ in range(2))
    return branches, outputs, inputs


def run(branches, outputs, inputs, grid):
    memory, results = None, []
    for branch, x, s in zip(branches, outputs, inputs, strict=True):
        y, memory = branch(x, s, memory, grid=grid)
        results.append(y)
    return results


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)], ids=["square", "3x7"])
@pytest.mark.parametrize("attention", [LIGHT, LIGHT_OUTPUT, BASE], ids=["light", "light-output", "base"])
def test_values_and_gradients_follow_the_algorithms(attention, grid, extra):
    branches, outputs, inputs = draw_stage(attention, grid, extra)
    parameters = [dict(branch.named_parameters()) for branch in branches]
    algorithm = algorithm_2 if attention["type"] == "MRLABase" else algorithm_4
    expected = algorithm(outputs, inputs, parameters, grid, extra, attention.get("previous", "shortcut"))
    actual = run(branches, outputs, inputs, grid)
    for t, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, t=t: f"block {t}: {m}")

    leaves = {f"x{t}": x for t, x in enumerate(outputs)} | {f"s{t}": s for t, s in enumerate(inputs)}
    leaves |= {f"{t}.{name}": p for t, ps in enumerate(parameters) for name, p in ps.items()}
    cotangents = [torch.randn_like(y) for y in actual]
    got, wanted = (
        torch.autograd.grad(ys, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True)
        for ys in (actual, expected)
    )
    for name, ours, theirs in zip(leaves, got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"gradient of {n}: {m}")
        if name.startswith(f"{DEPTH - 1}."):  # base's first query has one layer to choose from
            assert theirs.abs().sum() > 0, f"the comparison does not reach {name}"


@pytest.mark.parametrize(
    ("attention", "names"),
    [
        (LIGHT, {"query", "key", "value", "history_scale", "norm", "history_norm"}),
        (LIGHT_OUTPUT, {"query", "key", "value", "history_scale", "norm"}),
        ({"type": "MRLALight", "previous": "none"}, {"query", "key", "value", "norm"}),
        (BASE, {"query", "key", "value", "norm"}),
        ({"type": "MLA"}, {"query", "key", "value", "norm"}),
        ({"type": "LinearRLA", "head_channels": 4}, {"query", "key", "value", "norm"}),
    ],
)
def test_parameters_all_take_part(attention, names):
    """A parameter that no gradient reaches would stop DistributedDataParallel."""
    branches, outputs, inputs = draw_stage(attention, (3, 4), extra=1)
    found = {name.removeprefix("attention.").split(".")[0] for name, _ in branches[-1].named_parameters()}
    assert found == names
    sum(y.square().sum() for y in run(branches, outputs, inputs, (3, 4))).backward()
    assert all(p.grad is not None for branch in branches for p in branch.parameters())


@pytest.mark.parametrize("attention", [LIGHT, LIGHT_OUTPUT, BASE, {"type": "MLA"}, {"type": "LinearRLA"}])
def test_a_fresh_branch_is_an_exact_identity_that_can_learn(attention):
    branches = [TokenAttentionResidual(attention, CHANNELS, extra_tokens=2, first_in_stage=t == 0) for t in range(2)]
    for branch in branches:
        branch.init_weights()
    tokens = [torch.randn(2, 14, CHANNELS) for _ in range(2)]
    results = run(branches, tokens, [torch.randn(2, 14, CHANNELS) for _ in range(2)], (3, 4))
    for got, wanted in zip(results, tokens, strict=True):
        assert torch.equal(got, wanted)
    results[1].square().sum().backward()
    assert branches[1].norm.weight.grad.abs().min() > 0


@pytest.mark.parametrize("kind", ["MRLALight", MRLALight])
def test_defaults_on_tokens_are_the_papers(kind):
    """However the config names the variant."""
    light = TokenAttentionResidual({"type": kind}, 192).attention
    assert (light.heads, light.value_gelu, light.previous) == (12, True, "shortcut")


def test_own_values_come_before_the_defaults_on_tokens():
    base = TokenAttentionResidual(BASE, 192).attention
    assert (base.heads, base.value_gelu) == (12, False)
    own = TokenAttentionResidual({"type": "MRLALight", "head_channels": 64, "value": "dwconv"}, 192).attention
    assert (own.heads, own.value_gelu) == (3, False)


def test_drop_path_drops_extra_and_patch_tokens_together():
    branch = TokenAttentionResidual(LIGHT, CHANNELS, extra_tokens=1, drop_path=0.5, zero_init=False)
    tokens = torch.randn(64, 7, CHANNELS)
    torch.manual_seed(0)
    changed = (branch(tokens, torch.randn_like(tokens), grid=(2, 3))[0] != tokens).flatten(1)
    assert 0 < changed.any(1).sum() < 64
    assert ((changed.float().mean(1) < 0.01) | (changed.float().mean(1) > 0.99)).all()
    assert (branch.eval()(tokens, torch.randn_like(tokens), grid=(2, 3))[0] != tokens).flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close(dtype):
    branch = TokenAttentionResidual(LIGHT, CHANNELS, extra_tokens=1, zero_init=False)
    tokens, shortcut = torch.randn(2, 22, CHANNELS), torch.randn(2, 22, CHANNELS)
    exact = branch(tokens, shortcut, grid=(3, 7))[0]
    rough = branch.to(dtype)(tokens.to(dtype), shortcut.to(dtype), grid=(3, 7))[0]
    assert rough.dtype == dtype
    assert (rough.float() - exact).norm() < 0.05 * exact.norm()


def test_a_norm_without_scale_cannot_start_at_zero():
    with pytest.raises(InputError, match="no weight"):
        TokenAttentionResidual(LIGHT, 32, norm_cfg=dict(type="LN", elementwise_affine=False))
