"""Whether the Triton kernels compute on this machine what the reference does, tried at first use.

A step of MRLA-light, MRLA-base and MLA, forward and backward, with all that is fused, on a map of
odd sides. It leaves the caller's random state, modes and gradients as they are.
"""

import warnings
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mrla_mm.ops.base import base_fused, mla_fused
from mrla_mm.ops.dispatch import Outcome
from mrla_mm.ops.light import light_fused
from mrla_mm.ops.reference import FrozenNorm, Weights, base_layer, light_layer, mla_layer

MAP = (2, 6, 9, 7)  # two spans of rows
HEADS = 2
SHAPES = dict.fromkeys(("c", "shortcut", "value1", "value2", "grad"), MAP)
SHAPES |= dict.fromkeys(("history_scale", "weight", "bias", "mean", "variance"), (6,))
SHAPES |= dict(query=(1, 1, 5), key=(1, 1, 5), value=(6, 1, 3, 3), keep=(2,))
SHAPES |= dict(keys=(2, 2, 6), grad_keys=(2, 3, 6))
NORM = ("weight", "bias", "mean", "variance", "keep")
CONSTANT = ("mean", "variance", "keep", "grad", "grad_keys")
SOFTMAX_VARIANTS = {"base": (base_layer, base_fused), "MLA": (mla_layer, mla_fused)}
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def self_check(path: str, device: torch.device, dtype: torch.dtype, last: bool) -> Outcome:
    """Compare a path with the reference; a lack of memory, which says nothing of it, is raised."""
    difference = float("inf")
    try:
        difference, name = largest_difference(path, device, dtype, last)
        failure = f"{name} is off by {difference:.1e}, more than {TOLERANCE[dtype]}"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a driver or Triton itself may raise
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if difference <= TOLERANCE[dtype]:
        return Outcome("", difference)
    failure = f"the self-check on {device} in {dtype} failed: {failure}"
    wish = "Please report this with what `python -m mrla_mm doctor` prints"
    warnings.warn(f"layer attention runs without Triton: {failure}. {wish}", stacklevel=2)
    return Outcome(failure, difference)


def largest_difference(
    path: str, device: torch.device, dtype: torch.dtype, last: bool
) -> tuple[float, str]:
    """Largest relative difference of an output or gradient, infinite for NaN; and its name."""
    differences = []
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        # The second step launches the compiled kernels directly, on other values: a result that
        # nothing wrote cannot be right because the first step left it in memory.
        for seed in (0, 1):
            inputs = draw(device, dtype, last, seed)
            exact = {name: tensor.double() for name, tensor in inputs.items()}
            for variant in ("light", "base", "MLA"):
                results = step(variant, path, inputs)
                for name, wanted in step(variant, "naive", exact).items():
                    error = (results[name].double() - wanted).norm() / wanted.norm()
                    error = torch.nan_to_num(error, nan=torch.inf).item()
                    differences.append((error, f"{name} in {variant}"))
    return max(differences)


def draw(device: torch.device, dtype: torch.dtype, last: bool, seed: int) -> dict[str, Tensor]:
    """Named tensors; maps in a dtype and layout, the others in single precision."""
    generator = torch.Generator("cpu").manual_seed(seed)
    layout = torch.channels_last if last else torch.contiguous_format
    inputs = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        if shape == MAP:
            tensor = tensor.to(dtype).contiguous(memory_format=layout)
        inputs[name] = tensor.to(device)
    inputs["variance"].square_().add_(0.5)
    return inputs


def step(variant: str, path: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and gradients by name, of base and MLA at the third layer of a stage."""
    leaves = {}
    for name, tensor in inputs.items():
        leaves[name] = tensor.detach().requires_grad_(name not in CONSTANT)
    weights = Weights(leaves["query"], leaves["key"], leaves["value"])
    norm = FrozenNorm(**{name: leaves[name] for name in NORM})
    maps = leaves["c"], leaves["shortcut"]
    options = dict(heads=HEADS, add_relu=True, norm=norm)
    if variant == "light":
        function = light_layer if path == "naive" else partial(light_fused, path)
        weights = weights._replace(history_scale=leaves["history_scale"])
        outputs = [function(*maps, weights, has_history=True, **options)]
        upstream = [leaves["grad"]]
    else:
        reference, fused = SOFTMAX_VARIANTS[variant]
        function = reference if path == "naive" else partial(fused, path)
        earlier = leaves["keys"], (leaves["value1"], leaves["value2"])
        y, keys_or_averages, values = function(*maps, weights, earlier, **options)
        outputs = [y, keys_or_averages, *values]
        grad_keys = leaves["grad_keys"]
        upstream = [leaves["grad"], grad_keys[:, 0] if variant == "MLA" else grad_keys]
        upstream += [leaves["grad"]] * 3
    torch.autograd.backward(outputs, upstream)
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    gradients["output"] = outputs[0].detach()
    return {name: tensor for name, tensor in gradients.items() if tensor is not None}
