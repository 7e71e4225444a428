"""Multi-scale deformable attention (Zhu et al., ICLR 2021) through mmcv's own PyTorch version.

mmcv uses that version on the CPU and its compiled op on CUDA; here both take the same path.
"""

from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype, write_gradients


def ms_deform_attn_forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, **rest: int
) -> Tensor:
    """Return the attended values, (B, queries, heads * channels).

    Args:
        value: (B, keys, heads, channels), level after level.
        shapes: (levels, 2) height and width of each.
        starts: (levels,), which follows from the shapes.
        locations: (B, queries, heads, levels, points, 2) x and y in [0, 1].
        weights: (B, queries, heads, levels, points).
        **rest: what the compiled op needs besides.
    """
    dtype = compute_dtype(value)
    attended = _attend(value.to(dtype), shapes, locations.to(dtype), weights.to(dtype))
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

    def attend(value: Tensor, *more: Tensor) -> Tensor:
        return _attend(value, shapes, *more)

    write_gradients(attend, (value, locations, weights), grad_inputs, grad_output)


def _attend(*tensors: Tensor) -> Tensor:
    from mmcv.ops import multi_scale_deform_attn as mmcv  # imports this package's ops

    return mmcv.multi_scale_deformable_attn_pytorch(*tensors)
