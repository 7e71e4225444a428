"""Layer attention over tokens against Algorithms 2 and 4, step by step in float64."""

import math

import pytest
import torch

from mrla_mm.attention import MRLALight, TokenAttentionResidual
from mrla_mm.errors import InputError

from . import reference
from .stages import assert_same, named

LIGHT, LIGHT_OUTPUT = {"type": "MRLALight"}, {"type": "MRLALight", "previous": "output"}
BASE, MLA, LINEAR = ({"type": name} for name in ("MRLABase", "MLA", "LinearRLA"))
CHANNELS, HEAD_CHANNELS, DEPTH = 32, 16, 3


def normalise(tokens, branch, name):
    """LayerNorm of each token, eps 1e-6."""
    norm, centred = getattr(branch, name), tokens - tokens.mean(-1, keepdim=True)
    return (
        centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
        + norm.bias
    )


def gelu(z):
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def algorithms_2_and_4(branches, outputs, inputs, grid, extra, previous):
    """Base and light on maps in which patch i * W + j stands at row i, column j."""
    normed = [normalise(x, branch, "norm") for x, branch in zip(outputs, branches, strict=True)]
    maps = [x[:, extra:].transpose(1, 2).unflatten(2, grid) for x in normed]
    blocks, options = (
        [named(branch.attention) for branch in branches],
        dict(head_channels=HEAD_CHANNELS),
    )
    if type(branches[0].attention) is MRLALight:
        options |= dict(previous=previous, activation=gelu)
        if previous == "shortcut":  # the block's input
            inputs = [
                normalise(s, branch, "history_norm")
                for s, branch in zip(inputs, branches, strict=True)
            ]
        histories = [s[:, extra:].transpose(1, 2).unflatten(2, grid) for s in inputs]
        attended = reference.light(maps, histories, blocks, **options)
    else:
        attended = reference.base(maps, blocks, **options)
    patches = [out.flatten(2).transpose(1, 2) for out in attended]
    return [
        x + torch.cat([n[:, :extra], p], 1)
        for x, n, p in zip(outputs, normed, patches, strict=True)
    ]


def draw_stage(attention, grid, extra, seed=0):
    """A stage of random float64 branches, and its blocks' output and input tokens."""
    torch.manual_seed(seed)
    branches = [
        TokenAttentionResidual(
            attention, CHANNELS, extra_tokens=extra, first_in_stage=t == 0
        ).double()
        for t in range(DEPTH)
    ]
    for branch in branches:
        for parameter in branch.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        for norm in (branch.norm, branch.history_norm):
            if norm is not None:
                torch.nn.init.normal_(
                    norm.bias
                )  # else pooled features, hence all scores, are close to zero
    shape = (2, extra + grid[0] * grid[1], CHANNELS)
    outputs, inputs = (
        [torch.randn(shape).double().requires_grad_() for _ in range(DEPTH)] for _ in range(2)
    )
    return branches, outputs, inputs


def run(branches, outputs, inputs, grid):
    memory, results = (), []
    for branch, x, s in zip(branches, outputs, inputs, strict=True):
        y, *memory = branch(x, s, grid, *memory)
        results.append(y)
    return results


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)], ids=["square", "3x7"])
@pytest.mark.parametrize(
    "attention", [LIGHT, LIGHT_OUTPUT, BASE], ids=["light", "light-output", "base"]
)
def test_values_and_gradients_follow_the_algorithms(attention, grid, extra):
    branches, outputs, inputs = draw_stage(attention, grid, extra)
    previous = attention.get("previous", "shortcut")
    expected = algorithms_2_and_4(branches, outputs, inputs, grid, extra, previous)
    leaves = {f"x{t}": x for t, x in enumerate(outputs)} | {
        f"s{t}": s for t, s in enumerate(inputs)
    }
    leaves |= {
        f"{t}.{name}": p
        for t, branch in enumerate(branches)
        for name, p in branch.named_parameters()
    }
    for name, gradient in assert_same(
        run(branches, outputs, inputs, grid), expected, leaves, 1e-8
    ).items():
        if name.startswith(f"{DEPTH - 1}."):  # base's first query has one layer to choose from
            assert gradient.abs().sum() > 0, f"the comparison does not reach {name}"


@pytest.mark.parametrize(
    "attention", [LIGHT, LIGHT_OUTPUT, dict(LIGHT, previous="none"), BASE, MLA, LINEAR], ids=str
)
def test_a_fresh_branch_is_an_exact_identity_that_can_learn(attention):
    """Gradients reach every parameter: DistributedDataParallel stops with an error at others."""
    branches = [
        TokenAttentionResidual(attention, CHANNELS, extra_tokens=2, first_in_stage=t == 0)
        for t in range(2)
    ]
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
    changed = (branch(tokens, torch.randn_like(tokens), (2, 3))[0] != tokens).flatten(1)
    assert 0 < changed.any(1).sum() < 64
    assert ((changed.float().mean(1) < 0.01) | (changed.float().mean(1) > 0.99)).all()
    assert (
        (branch.eval()(tokens, torch.randn_like(tokens), (2, 3))[0] != tokens)
        .flatten(1)
        .any(1)
        .all()
    )


def test_a_norm_without_scale_cannot_start_at_zero():
    with pytest.raises(InputError, match="no weight"):
        TokenAttentionResidual(LIGHT, 32, norm_cfg=dict(type="LN", elementwise_affine=False))
