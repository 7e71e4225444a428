"""Whether compiled code computes on this machine what the reference does.

A step of a layer, forward and backward, on the smallest map for which the path runs the same code,
against the reference in double precision: the outputs and all gradients. It leaves the caller's
random state, modes and gradients as they are.
"""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mrla_mm.ops.base import base_fused, mla_fused
from mrla_mm.ops.coefficients import Parameters
from mrla_mm.ops.dispatch import passes_of
from mrla_mm.ops.light import light_fused
from mrla_mm.ops.passes import Passes
from mrla_mm.ops.proof import Form, describe, prove, summary
from mrla_mm.ops.reference import base_layer, light_layer, mla_layer

CONSTANT = ("mean", "variance", "keep")  # takes no gradient
EPS = 1e-3  # of the norm
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def self_check(form: Form, passes: Passes) -> tuple[str, float]:
    """How a path fails, or an empty string, and its largest relative difference.

    A lack of memory for tensors, which says nothing of the path, is raised.
    """
    small = shrink(form, passes)
    dtypes = {form.dtype, *form.dtypes} - {None}
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    try:
        difference, name = largest_difference(small, passes)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a driver or Triton itself may raise
        return describe(error), float("inf")
    if difference <= tolerance:
        return "", difference
    kind = "MLA" if form.is_mla else "base" if form.depth else "light"
    where = f"{name} of {kind} in {form.dtype} on a map {tuple(small.shape)}"
    return f"{where} is off by {difference:.1e}, more than {tolerance}", difference


def probe(path: str, x: Tensor, variants: tuple[str, ...] = ("light", "base", "MLA")) -> str:
    """Prove a path for layers of some variants on a map like x; return how all proofs ended."""
    dtypes = Parameters(*[torch.float32] * len(Parameters._fields))
    for variant in variants:
        is_light = variant == "light"
        form = Form(
            path=path, device=x.device, dtype=x.dtype, channels_last=not x.is_contiguous(),
            shape=x.shape, heads=max(1, x.shape[1] // 32), add_relu=True, has_history=is_light,
            is_mla=variant == "MLA", depth=0 if is_light else 2, kernel_size=3,
            dtypes=dtypes if is_light else dtypes._replace(history_scale=None),
        )  # fmt: skip
        prove(form, passes_of(path))
    return summary(path)


def shrink(form: Form, passes: Passes) -> Form:
    """Form of the smallest layer for which the path runs the same code, one side after another."""
    specialisation = form.specialisation(passes)
    head_channels = form.shape[1] // form.heads
    for side in (1, 0, 3, 2):  # channels, batch, width, height
        step = head_channels if side == 1 else 1
        for length in range(step, form.shape[side] + 1, step):
            shape = torch.Size([*form.shape[:side], length, *form.shape[side + 1 :]])
            smaller = form._replace(shape=shape, heads=shape[1] // head_channels)
            if smaller.specialisation(passes) == specialisation:
                form = smaller
                break
    return form


def largest_difference(form: Form, passes: Passes) -> tuple[float, str]:
    """Largest relative difference of an output or gradient, infinite for NaN; and its name."""
    differences = []
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(form.device.type, enabled=False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        # The second step is of a stage's last layer, with other values, and one program does what
        # many did: its compiled kernels are launched directly.
        for is_last in (False, True):
            inputs = random_inputs(form, seed=int(is_last))
            exact = {name: tensor.double() for name, tensor in inputs.items()}
            wanted = forward_backward(form, exact, is_naive=True, is_last=is_last)
            with passes.few_programs() if is_last else nullcontext():
                results = forward_backward(form, inputs, is_naive=False, is_last=is_last)
            for name, tensor in wanted.items():
                error = (results[name].double() - tensor).norm() / tensor.norm().clamp_min(1e-3)
                differences.append((torch.nan_to_num(error, nan=torch.inf).item(), name))
    return max(differences)


def random_inputs(form: Form, seed: int) -> dict[str, Tensor]:
    """Named tensors of a layer: maps, parameters, earlier keys and values."""
    generator = torch.Generator("cpu").manual_seed(seed)
    layout = torch.channels_last if form.channels_last else torch.contiguous_format
    batch, channels = form.shape[:2]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def draw_map() -> Tensor:
        values = normal(*form.shape) + normal(batch, channels, 1, 1)
        return values.to(form.dtype).contiguous(memory_format=layout)

    inputs = {"c": draw_map(), "shortcut": draw_map()}
    projection = (1, 1, form.kernel_size)
    shapes = {name: (channels,) for name in Parameters._fields}
    shapes |= dict(query=projection, key=projection, value=(channels, 1, 3, 3), keep=(batch,))
    for name, dtype in zip(Parameters._fields, form.dtypes, strict=True):
        if dtype is not None:
            inputs[name] = normal(*shapes[name]).to(dtype)
    for name in {"query", "key"} & inputs.keys():
        # Saturated scores would cost their gradients digits.
        inputs[name] = inputs[name] / form.shape[1] ** 0.5
    if "variance" in inputs:
        inputs["variance"] = inputs["variance"].square() + 0.5
    if form.depth > 1:
        inputs["keys"] = normal(batch, form.depth - 1, channels)
        inputs |= {f"value {index}": draw_map() for index in range(form.depth - 1)}
    return {name: tensor.to(form.device) for name, tensor in inputs.items()}


def forward_backward(
    form: Form, inputs: dict[str, Tensor], *, is_naive: bool, is_last: bool
) -> dict[str, Tensor]:
    """Outputs and gradients by name; nobody uses keys and values of a stage's last layer."""
    leaves = {}
    for name, tensor in inputs.items():
        leaves[name] = tensor.detach().requires_grad_(name not in CONSTANT)
    y, *others = run_layer(form, leaves, is_naive)
    outputs = [y] if is_last else [y, *others]
    generator = torch.Generator("cpu").manual_seed(2)
    upstream = []
    for output in outputs:
        grad = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
        upstream.append(grad.to(form.dtype).to(output))
    torch.autograd.backward(outputs, upstream)
    results = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            results[f"gradient of {name}"] = leaf.grad
            if leaf.dim() == 4:  # what comes through the averages is small beside the rest of a map
                results[f"average gradient of {name}"] = leaf.grad.double().mean((2, 3))
    return results


def run_layer(form: Form, inputs: dict[str, Tensor], is_naive: bool) -> Sequence[Tensor]:
    """All outputs of a layer, by the reference or fused."""
    parameters = Parameters(**{name: inputs.get(name) for name in Parameters._fields})
    arguments = inputs["c"], inputs["shortcut"], parameters.weights()
    settings = form.settings() | dict(norm=parameters.frozen_norm(EPS))
    if not form.depth:
        light = light_layer if is_naive else partial(light_fused, form.path)
        return [light(*arguments, **settings)]
    naive, fused = (mla_layer, mla_fused) if form.is_mla else (base_layer, base_fused)
    layer = naive if is_naive else partial(fused, form.path)
    memory = [inputs[name] for name in inputs if name == "keys" or name.startswith("value ")]
    y, memory = layer(*arguments, memory, **settings)
    return [y, *memory]
