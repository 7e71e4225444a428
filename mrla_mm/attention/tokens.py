"""The residual branch over tokens: where every transformer backbone calls layer attention."""

import torch
from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention.residual import AttentionResidual, build_branch_norm

Grid = tuple[int, int]  # H and W, rows and columns of the patch tokens


def with_token_defaults(attention: dict) -> dict:
    """Complete a variant's config with what its class uses on tokens."""
    kind = attention["type"]
    if isinstance(kind, str):
        with MODELS.switch_scope_and_registry(attention.get("_scope_")) as registry:
            kind = registry.get(kind)
    return {**getattr(kind, "token_defaults", {}), **attention}


def to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Lay patch tokens out on their grid: (B, H * W, C) -> (B, C, H, W), without a copy.

    The batch keeps the largest stride: behind ``transpose(1, 2).unflatten(2, grid)`` torch's batch
    norm returns wrong gradients for a batch of one on a CPU.
    """
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(feature_map: Tensor) -> Tensor:
    """Read a map row by row: (B, C, H, W) -> (B, H * W, C), without a copy."""
    return feature_map.permute(0, 2, 3, 1).flatten(1, 2)


class TokenAttentionResidual(AttentionResidual):
    """Layer attention over tokens as a residual branch (attention of Algorithms 2 and 4).

    With x the tokens that a block returns and s those it took, extra tokens (class, distillation)
    first:

        n = norm(x)
        o, memory = attention(map of n's patches, map of history_norm(s)'s patches, memory)
        y = x + drop_path(concat(n's extra tokens, o))

    `history_norm` exists only for an attention that sets `uses_shortcut`, as MRLA-light does with
    previous="shortcut"; any other gets None as its shortcut. Both norms start at zero.

    Args:
        attention: config of the layer attention. On tokens its `head_channels` is 16 unless given,
            and the `value` of MRLA-light "dwconv_gelu".
        extra_tokens: number of tokens in front of the patches.
        norm_cfg: config of the norms, over the channels of a token.
        **kwargs: drop_path, the block's own, and what else `AttentionResidual` takes.
    """

    def __init__(
        self,
        attention: dict,
        channels: int,
        *,
        extra_tokens: int = 0,
        norm_cfg: dict | None = None,
        **kwargs: object,
    ) -> None:
        norm_cfg = norm_cfg or dict(type="LN", eps=1e-6)
        super().__init__(with_token_defaults(attention), channels, norm_cfg=norm_cfg, **kwargs)
        self.extra_tokens = extra_tokens
        uses_shortcut = getattr(self.attention, "uses_shortcut", False)
        self.history_norm = build_branch_norm(norm_cfg, channels) if uses_shortcut else None
        self.reset_zero_init()

    def forward(
        self, tokens: Tensor, shortcut: Tensor | None, grid: Grid, *memory: Tensor
    ) -> tuple[Tensor, ...]:
        """Add the attention to the tokens of a block; return y and the new memory.

        Shapes:
            tokens, the block's output, and shortcut, its input, (B, E + H * W, C) with E extra
            tokens first; grid (H, W); memory as the attention defines it -> y (B, E + H * W, C).
        """
        extra = self.extra_tokens
        normed = self.norm(tokens)
        patches = to_map(normed[:, extra:], grid)  # (B, C, H, W)
        history = None
        if self.history_norm is not None:
            history = to_map(self.history_norm(shortcut[:, extra:]), grid)
        out, memory = self.attention(patches, history, memory)
        self.check_memory(memory)
        branch = to_tokens(self.activate(out))
        if extra:
            branch = torch.cat([normed[:, :extra], branch], dim=1)
        return (tokens + self.drop_path(branch), *memory)
