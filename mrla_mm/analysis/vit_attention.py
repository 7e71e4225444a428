"""Where a patch of a vision transformer looks: the attention maps of its last layer (the figure in App. B.5).

The models use scaled_dot_product_attention, which returns no weights, so they are computed from its inputs:

    A_h = softmax(q_h k_h^T / sqrt(d))      rows sum to 1 over all tokens, extra tokens included
"""

import torch
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn

from mrla_mm.errors import InputError


@torch.no_grad()
def last_layer_attention(model: nn.Module, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Run a model with a `VisionTransformer` (ViT, CeiT and their MRLA versions) on images (B, 3, H, W).

    Returns:
        tuple: weights (B, G, N, N) of its last layer's heads, extra tokens first, and the grid of the patches.

    Raises:
        InputError: the model has no vision transformer.

    Example:
        >>> import torch
        >>> from mrla_mm.analysis.vit_attention import last_layer_attention
        >>> from mrla_mm.backbones import MRLAViT
        >>> weights, grid = last_layer_attention(MRLAViT("deit-tiny").eval(), torch.rand(1, 3, 96, 160))
        >>> tuple(weights.shape), grid
        ((1, 3, 61, 61), (6, 10))
    """
    backbone = next((module for module in model.modules() if isinstance(module, VisionTransformer)), None)
    if backbone is None:
        raise InputError(f"{type(model).__name__} has no vision transformer: give a config with ViT, CeiT or DeiT")
    attention, kept = backbone.layers[-1].attn, {}
    handles = [
        attention.register_forward_pre_hook(lambda module, args: kept.update(tokens=args[0])),
        backbone.patch_embed.register_forward_hook(lambda module, args, out: kept.update(grid=out[1])),
    ]
    try:
        backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    qkv = attention.qkv(kept["tokens"]).unflatten(-1, (3, attention.num_heads, attention.head_dims))  # (B, N, 3, G, d)
    query, key, _ = qkv.permute(2, 0, 3, 1, 4)  # (B, G, N, d) each
    weights = (query @ key.transpose(-1, -2) * attention.head_dims**-0.5).softmax(-1)
    return weights, tuple(int(side) for side in kept["grid"])
