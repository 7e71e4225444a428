"""Global average pooling with dropout, the neck between EfficientNet and its classifier."""

from mmengine.registry import MODELS
from mmpretrain.models.necks import GlobalAveragePooling
from torch import Tensor, nn

from mrla_mm.arguments import RATE, check_arguments


@MODELS.register_module()
class DroppedAveragePooling(GlobalAveragePooling):
    """Average each map over its grid and, in training, drop features before a linear classifier sees them.

    Args:
        drop_rate: probability to drop a feature of a sample.

    Raises:
        InputError: for a probability outside [0, 1).

    Example:
        >>> import torch
        >>> from mrla_mm.necks import DroppedAveragePooling
        >>> tuple(DroppedAveragePooling(0.2)((torch.rand(2, 1280, 7, 7),))[0].shape)
        (2, 1280)
    """

    def __init__(self, drop_rate: float) -> None:
        check_arguments(dict(drop_rate=drop_rate), dict(drop_rate=RATE))
        super().__init__(dim=2)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pool maps (B, C, H, W) to features (B, C)."""
        return tuple(self.dropout(features) for features in super().forward(maps))
