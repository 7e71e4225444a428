"""The residual branch over tokens: the one place where every transformer backbone calls layer attention."""

import torch
from torch import Tensor

from mrla_mm.attention.base import Memory
from mrla_mm.attention.residual import LayerAttentionResidual, build_branch_norm, find_variant
from mrla_mm.errors import InputError


def with_token_defaults(attention: dict) -> dict:
    """Complete a variant's config with what it uses on tokens; a type that is no variant is left to its builder."""
    cls = find_variant(attention.get("type")) if isinstance(attention, dict) else None
    return attention if cls is None else {**cls.token_defaults, **attention}


def to_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Lay patch tokens out on their grid: (B, H * W, C) -> (B, C, H, W), without a copy."""
    return tokens.transpose(1, 2).unflatten(2, grid)


def to_tokens(feature_map: Tensor) -> Tensor:
    """Read a map row by row: (B, C, H, W) -> (B, H * W, C), without a copy."""
    return feature_map.flatten(2).transpose(1, 2)


class TokenAttentionResidual(LayerAttentionResidual):
    """Layer attention over tokens as a residual branch (Algorithms 2 and 4).

    With x the tokens a block puts out and s those it took in, extra tokens (class, distillation) first:

        n = norm(x)
        o, memory = attention(map of n's patches, map of history_norm(s)'s patches, memory)
        y = x + drop_path(concat(n's extra tokens, o))

    `history_norm` exists only for an attention that uses the shortcut: MRLA-light with previous="shortcut". A fresh
    branch is an exact identity, since both norms start with a weight of zero.

    Args:
        attention: config of the layer attention. On tokens its `head_channels` is 16 unless given, and the `value` of
            MRLA-light "dwconv_gelu".
        channels: C of the tokens.
        extra_tokens: number of tokens in front of the patches.
        norm_cfg: config of the norms, over the channels of a token.
        drop_path: probability to drop the branch for a sample in training; the block's own.
        zero_init: start the norms' weights at zero, else at one.
        first_in_stage: whether the layer starts a stage.

    Raises:
        InputError: for a value that cannot work, naming it.
    """

    def __init__(
        self,
        attention: dict,
        channels: int,
        *,
        extra_tokens: int = 0,
        norm_cfg: dict | None = None,
        drop_path: float = 0.0,
        zero_init: bool = True,
        first_in_stage: bool = False,
    ) -> None:
        norm_cfg = norm_cfg or dict(type="LN", eps=1e-6)
        super().__init__(
            with_token_defaults(attention),
            channels,
            norm_cfg=norm_cfg,
            drop_path=drop_path,
            zero_init=zero_init,
            first_in_stage=first_in_stage,
        )
        if extra_tokens < 0:
            raise InputError(f"extra_tokens={extra_tokens} must not be negative")
        self.extra_tokens = extra_tokens
        self.history_norm = build_branch_norm(norm_cfg, channels) if self.attention.uses_shortcut else None
        self.reset_scale()

    @property
    def attention_defaults(self) -> dict[str, object]:
        """Arguments of the attention where its config gives none."""
        return {**super().attention_defaults, **self.attention.token_defaults}

    def forward(
        self, tokens: Tensor, shortcut: Tensor, memory: Memory = None, *, grid: tuple[int, int]
    ) -> tuple[Tensor, Memory]:
        """Add the attention to the tokens of a block.

        Shapes:
            tokens, the block's output, and shortcut, its input, (B, E + H * W, C) with E extra tokens first; grid
            (H, W); memory as the attention defines it -> y (B, E + H * W, C) and the new memory.

        Raises:
            InputError: if the tokens do not fit the grid or the memory.
        """
        extra = self.extra_tokens
        self.check_tokens(tokens, grid)
        normed = self.norm(tokens)
        history = None
        if self.history_norm is not None:
            self.check_tokens(shortcut, grid)
            history = to_map(self.history_norm(shortcut[:, extra:]), grid)  # (B, C, H, W)
        out, memory = self.attention(to_map(normed[:, extra:], grid), history, memory)  # (B, C, H, W)
        branch = torch.cat([normed[:, :extra], to_tokens(out)], dim=1) if extra else to_tokens(out)
        return tokens + self.drop_path(branch), memory

    def check_tokens(self, tokens: Tensor, grid: tuple[int, int]) -> None:
        """Raise InputError unless the tokens (B, E + H * W, C) fit the grid (H, W)."""
        height, width = grid
        channels, count = self.attention.channels, self.extra_tokens + height * width
        if tokens.dim() != 3 or tuple(tokens.shape[1:]) != (count, channels):
            raise InputError(
                f"a {height} x {width} grid with {self.extra_tokens} extra tokens needs tokens of shape "
                f"(B, {count}, {channels}), got {tuple(tokens.shape)}; pass the grid of the patches and build the "
                "branch with the model's extra_tokens"
            )
