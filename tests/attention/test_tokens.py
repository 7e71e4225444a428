"""Layer attention over tokens against Algorithms 2 and 4, spelled out step by step in float64, gradients too."""

import math

import pytest
import torch

from mrla_mm.attention import MRLALight, TokenAttentionResidual
from mrla_mm.errors import InputError

from . import reference
from .stages import assert_same

LIGHT, LIGHT_OUTPUT = {"type": "MRLALight"}, {"type": "MRLALight", "previous": "output"}
BASE, MLA, LINEAR = ({"type": name} for name in ("MRLABase", "MLA", "LinearRLA"))
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
    leaves = {f"x{t}": x for t, x in enumerate(outputs)} | {f"s{t}": s for t, s in enumerate(inputs)}
    leaves |= {f"{t}.{name}": p for t, ps in enumerate(parameters) for name, p in ps.items()}
    for name, gradient in assert_same(run(branches, outputs, inputs, grid), expected, leaves, 1e-8).items():
        if name.startswith(f"{DEPTH - 1}."):  # base's first query has one layer to choose from
            assert gradient.abs().sum() > 0, f"the comparison does not reach {name}"


@pytest.mark.parametrize("attention", [LIGHT, LIGHT_OUTPUT, dict(LIGHT, previous="none"), BASE, MLA, LINEAR], ids=str)
def test_a_fresh_branch_is_an_exact_identity_that_can_learn(attention):
    """Gradients reach every parameter: DistributedDataParallel stops with an error at others."""
    branches = [TokenAttentionResidual(attention, CHANNELS, extra_tokens=2, first_in_stage=t == 0) for t in range(2)]
    for branch in branches:
        branch.init_weights()
    tokens = [torch.randn(2, 14, CHANNELS) for _ in range(2)]
    results = run(branches, tokens, [torch.randn(2, 14, CHANNELS) for _ in range(2)], (3, 4))
    for got, wanted in zip(results, tokens, strict=True):
        assert torch.equal(got, wanted)
    sum(y.square().sum() for y in results).backward()
    assert branches[1].norm.weight.grad.abs().min() > 0
    assert all(p.grad is not None for branch in branches for p in branch.parameters())


@pytest.mark.parametrize(
    ("cfg", "heads", "gelu"),
    [
        (LIGHT, 12, True),
        (dict(type=MRLALight), 12, True),
        (BASE, 12, False),
        (dict(LIGHT, head_channels=64, value="dwconv"), 3, False),
    ],
)
def test_defaults_on_tokens_are_the_papers(cfg, heads, gelu):
    """However the config names the variant; the config's own values come before them."""
    attention = TokenAttentionResidual(cfg, 192).attention
    assert (attention.heads, attention.value_gelu) == (heads, gelu)


def test_drop_path_drops_extra_and_patch_tokens_together():
    branch = TokenAttentionResidual(LIGHT, CHANNELS, extra_tokens=1, drop_path=0.5, zero_init=False)
    tokens = torch.randn(64, 7, CHANNELS)
    torch.manual_seed(0)
    changed = (branch(tokens, torch.randn_like(tokens), grid=(2, 3))[0] != tokens).flatten(1)
    assert 0 < changed.any(1).sum() < 64
    assert ((changed.float().mean(1) < 0.01) | (changed.float().mean(1) > 0.99)).all()
    assert (branch.eval()(tokens, torch.randn_like(tokens), grid=(2, 3))[0] != tokens).flatten(1).any(1).all()


def test_a_norm_without_scale_cannot_start_at_zero():
    with pytest.raises(InputError, match="no weight"):
        TokenAttentionResidual(LIGHT, 32, norm_cfg=dict(type="LN", elementwise_affine=False))
