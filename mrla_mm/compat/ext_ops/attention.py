"""Multi-scale deformable attention (Zhu et al., ICLR 2021) through mmcv's own PyTorch version.

mmcv uses that version on the CPU and its compiled op on CUDA; here both take the same path.
"""

from functools import partial

from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype, write_gradients


def ms_deform_attn_forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, **rest: int
) -> Tensor:
    """Return the attended values, (B, queries, heads * channels)."""
    dtype = compute_dtype(value)
    attended = _attend(shapes, *(each.to(dtype) for each in (value, locations, weights)))
    return attended.to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    *grad_inputs: Tensor,
    **rest: int,
) -> None:
    """Write the gradients of value, sampling locations and attention weights."""
    attend = partial(_attend, shapes)
    write_gradients(attend, (value, locations, weights), grad_inputs, grad_output)


def _attend(shapes: Tensor, value: Tensor, *more: Tensor) -> Tensor:
    from mmcv.ops import multi_scale_deform_attn as mmcv  # imports this package's ops

    return mmcv.multi_scale_deformable_attn_pytorch(value, shapes, *more)
