"""Multi-scale deformable attention (Zhu et al., ICLR 2021) through mmcv's own PyTorch version.

mmcv uses that version on the CPU and its compiled op on CUDA; here both take the same path.
"""

from torch import Tensor

from mrla_mm.compat.ext_ops.common import compute_dtype, write_gradients


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return the attended values, (B, queries, heads * channels).

    Args:
        value: (B, keys, heads, channels), level after level.
        value_spatial_shapes: (levels, 2) height and width of each.
        value_level_start_index: (levels,), which follows from the shapes.
        sampling_locations: (B, queries, heads, levels, points, 2) x and y in [0, 1].
        attention_weights: (B, queries, heads, levels, points).
        im2col_step: of mmcv's kernel, unused.
    """
    dtype = compute_dtype(value)
    attended = _attend(
        value.to(dtype),
        value_spatial_shapes,
        sampling_locations.to(dtype),
        attention_weights.to(dtype),
    )
    return attended.to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Write the gradients of value, sampling locations and attention weights."""
    write_gradients(
        lambda value, *rest: _attend(value, value_spatial_shapes, *rest),
        (value, sampling_locations, attention_weights),
        (grad_value, grad_sampling_loc, grad_attn_weight),
        grad_output,
    )


def _attend(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import (
        multi_scale_deformable_attn_pytorch,
    )  # it imports this package's ops

    return multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
