"""Named float64 tensors for layer attention in every form that is fused."""

import functools
import os
from importlib.util import find_spec

import pytest
import torch

from mrla_mm.ops import BatchNorm, Weights, base_fused, light_fused, mla_fused
from mrla_mm.ops.reference import base_layer, light_layer, mla_layer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="needs a GPU, or TRITON_INTERPRET=1 as in test_triton_interpreted",
)
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DEVICES = dict.fromkeys(("naive", "fused", "numba"), "cpu") | {"triton": DEVICE}
CONSTANT = {"keep", "mean", "variance"}  # takes no gradient
HEAD_CHANNELS = 4
EXTENTS = ("attention", "branch", "block end", "batch norm")


def draw(
    shape, extent, *, depth=0, gated=True, value=True, history=True, learned=True, keep=True,
):  # fmt: skip
    """Named tensors: maps, parameters, the norm's, and depth earlier keys and values.

    No sum that a ReLU meets is so near 0 that rounding decides about it.
    """
    torch.manual_seed(0)
    batch, channels = shape[:2]
    c, shortcut = torch.randn(shape) + torch.randn(batch, channels, 1, 1), torch.randn(shape)
    total = c + shortcut
    shortcut += torch.where(total.abs() < 0.2, 0.3 * total.sign(), 0)
    tensors = dict(c=c, shortcut=shortcut)
    if not history and extent != "block end":
        del tensors["shortcut"]
    if gated:
        tensors |= dict(query=torch.randn(1, 1, 5), key=torch.randn(1, 1, 5) * 0.5)
    if value:
        tensors["value"] = torch.randn(channels, 1, 3, 3)
    if history and learned:
        tensors["history_scale"] = torch.randn(channels)
    if extent != "attention":
        tensors |= {name: torch.randn(channels) for name in ("weight", "bias")}
        if extent != "batch norm":
            tensors |= dict(mean=torch.randn(channels), variance=torch.rand(channels) + 0.5)
        if keep:
            tensors["keep"] = torch.arange(batch).remainder(2).add(0.25)
    if depth:
        tensors["keys"] = torch.randn(batch, depth, channels)
        tensors |= {f"values{s}": torch.randn(shape) for s in range(depth)}
    return {name: tensor.double() for name, tensor in tensors.items()}


def parts(t):
    weights = Weights(*(t.get(name) for name in Weights._fields))
    norm = None
    if "mean" in t:
        norm = BatchNorm(*(t.get(name) for name in BatchNorm._fields[:-2]), eps=0.1)
    elif "bias" in t:
        norm = BatchNorm(t["weight"], t["bias"], None, None, t.get("keep"), 0.1, momentum=0.1)
    memory = [t[name] for name in t if name == "keys" or name.startswith("values")]
    return weights, norm, memory, t["c"].shape[1] // HEAD_CHANNELS


def light(t, extent, path, history=True):
    weights, norm, _, heads = parts(t)
    function = light_layer if path == "naive" else functools.partial(light_fused, path)
    history = history and "shortcut" in t
    options = dict(heads=heads, has_history=history, add_relu=extent == "block end", norm=norm)
    return function(t["c"], t.get("shortcut"), weights, **options)


def base(t, extent, path, functions=(base_layer, base_fused)):
    naive, fused = functions
    weights, norm, memory, heads = parts(t)
    function = naive if path == "naive" else functools.partial(fused, path)
    options = dict(heads=heads, add_relu=extent == "block end", norm=norm)
    return function(t["c"], t.get("shortcut"), weights, memory, **options)


# MLA has averages (B, C) and maps in place of keys and values
mla = functools.partial(base, functions=(mla_layer, mla_fused))


def base_joined(t, extent, path, variant=base):
    """One map that output, keys and values all enter, so that backward gets a gradient of each."""
    out, (keys, *values) = variant(t, extent, path)
    keys = keys.view(len(keys), -1, keys.shape[-1])
    ramp = torch.arange(1, keys[0].numel() + 1).to(keys).view(keys.shape[1:]) / keys[0].numel()
    weighted = sum(0.5 * (s + 1) * value for s, value in enumerate(values))
    return out + weighted + (keys * ramp).sum(1).to(out.dtype)[:, :, None, None]


mla_joined = functools.partial(base_joined, variant=mla)


def results(function, tensors, *, dtype, layout="contiguous", device="cpu"):
    """Output and all gradients; feature maps in dtype, parameters in at least float32."""
    leaves = {}
    for name, tensor in tensors.items():
        is_map = tensor.dim() == 4 and name != "value"
        leaf = tensor.to(device, dtype if is_map or dtype == torch.float64 else torch.float32)
        leaf = leaf.contiguous(memory_format=LAYOUTS[layout]) if is_map else leaf
        leaves[name] = leaf.detach().requires_grad_(name not in CONSTANT)
    out = function(leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(out))
    return {"output": out.detach()} | {
        name: leaf.grad for name, leaf in leaves.items() if name not in CONSTANT
    }
