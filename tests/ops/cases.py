"""Named float64 tensors for layer attention in every form that is fused, and both ways to compute it."""

import os

import pytest
import torch

from mrla_mm.ops import FrozenNorm, Weights, base_fused, light_fused, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="Triton needs a GPU or TRITON_INTERPRET=1; test_triton_interpreted runs these in a process of its own",
)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CONSTANT = {"keep", "mean", "variance"}  # takes no gradient
HEAD_CHANNELS = 4
EXTENTS = ("attention", "branch", "block end")


def draw(
    shape,
    extent,
    *,
    depth=0,
    gated=True,
    linear=False,
    value=True,
    history=True,
    learned=True,
    keep=True,
):
    """Named tensors: c and shortcut, parameters, the branch's affine, and depth earlier keys and values.

    No sum that a ReLU meets is so near 0 that rounding decides about it.
    """
    torch.manual_seed(0)
    batch, channels = shape[:2]
    c, shortcut = torch.randn(shape) + torch.randn(batch, channels, 1, 1), torch.randn(shape)
    total = c + shortcut
    shortcut += torch.where(total.abs() < 0.2, 0.3 * total.sign(), 0)
    found = dict(c=c, shortcut=shortcut)
    if not history and extent != "block end":
        del found["shortcut"]
    size = (channels, channels) if linear else (1, 1, 5)
    if gated:
        found |= dict(query=torch.randn(size), key=torch.randn(size) * 0.5)
    if value:
        found["value"] = torch.randn(channels, 1, 3, 3)
    if history and learned:
        found["history_scale"] = torch.randn(channels)
    if extent != "attention":
        found |= {name: torch.randn(channels) for name in ("weight", "bias", "mean")}
        found["variance"] = torch.rand(channels) + 0.5
        if keep:
            found["keep"] = torch.arange(batch).remainder(2).add(0.25)
    if depth:
        found["keys"] = torch.randn(batch, depth, channels)
        found |= {f"values{s}": torch.randn(shape) for s in range(depth)}
    return {name: tensor.double() for name, tensor in found.items()}


def parts(t):
    """Weights, the norm or None, earlier keys and values, and the number of heads."""
    weights = Weights(*(t.get(name) for name in Weights._fields))
    norm = (
        FrozenNorm(*(t.get(name) for name in FrozenNorm._fields[:5]), eps=0.1)
        if "mean" in t
        else None
    )
    values = [t[name] for name in t if name.startswith("values")]
    return weights, norm, (t.get("keys"), values), t["c"].shape[1] // HEAD_CHANNELS


def naive_branch(x, out, norm):
    """The branch x + keep norm(out), from its definition."""
    if norm is None:
        return out
    return reference.affine_residual(
        x, out, *reference.frozen_bn_affine(*norm[2:4], *norm[:2], norm.eps), norm.keep
    )


def light(t, extent, path, history=True):
    """MRLA-light, naive or by a fused path: (B, C, H, W)."""
    (weights, norm, _, heads), c, shortcut = parts(t), t["c"], t.get("shortcut")
    add_relu = extent == "block end"
    if path != "naive":
        history = history and shortcut is not None
        options = dict(heads=heads, has_history=history, add_relu=add_relu, norm=norm)
        return light_fused(path, c, shortcut, weights, **options)
    x = (c + shortcut).relu() if add_relu else c
    gate = None
    if weights.query is not None:
        gate = reference.light_gate(*query_and_key(x, weights, heads))
    value = reference.depthwise_value(x, weights.value)
    out = reference.light_attention(
        value, gate, shortcut if history else None, weights.history_scale
    )
    return naive_branch(x, out, norm)


def query_and_key(x, weights, heads):
    pooled = reference.global_average(x)
    return [
        reference.split_heads(reference.project(pooled, w), heads)
        for w in (weights.query, weights.key)
    ]


def base(t, extent, path):
    """MRLA-base, naive or by a fused path: y, the layers' keys, and the layers' values."""
    (weights, norm, (keys, values), heads), c, shortcut = parts(t), t["c"], t.get("shortcut")
    add_relu = extent == "block end"
    if path != "naive":
        return base_fused(
            path, c, shortcut, weights, (keys, values), heads=heads, add_relu=add_relu, norm=norm
        )
    x = (c + shortcut).relu() if add_relu else c
    query, key = query_and_key(x, weights, heads)
    value = reference.depthwise_value(x, weights.value)
    own = key.flatten(1).unsqueeze(1)
    keys = own if keys is None else torch.cat((keys, own), 1)
    scores = reference.softmax_scores(query, keys.unflatten(2, (heads, -1)).unbind(1))
    out = reference.weighted_sum(scores, (*values, value))
    return naive_branch(x, out, norm), keys, (*values, value)


def base_joined(t, extent, path):
    """One map that output, keys and values all enter, so that backward gets a gradient of each."""
    out, keys, values = base(t, extent, path)
    weights = torch.arange(1, keys[0].numel() + 1).to(keys).view(keys.shape[1:]) / keys[0].numel()
    weighted = sum(0.5 * (s + 1) * value for s, value in enumerate(values))
    return out + weighted + (keys * weights).sum(1).to(out.dtype)[:, :, None, None]


def results(function, tensors, *, dtype, layout="contiguous"):
    """Output and all gradients; feature maps in dtype, parameters in at least float32."""
    leaves = {}
    for name, tensor in tensors.items():
        is_map = tensor.dim() == 4 and name != "value"
        leaf = tensor.to(DEVICE, dtype if is_map or dtype == torch.float64 else torch.float32)
        leaf = leaf.contiguous(memory_format=LAYOUTS[layout]) if is_map else leaf
        leaves[name] = leaf.detach().requires_grad_(name not in CONSTANT)
    out = function(leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(out))
    return {"output": out.detach()} | {
        name: leaf.grad for name, leaf in leaves.items() if name not in CONSTANT
    }
