"""Global average pooling with dropout, the neck between EfficientNet and its classifier."""

from mmengine.registry import MODELS
from mmpretrain.models.necks import GlobalAveragePooling
from torch import Tensor, nn


@MODELS.register_module(force=True)
class DroppedAveragePooling(GlobalAveragePooling):
    """Average each map over its grid and, in training, drop features."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__(dim=2)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pool maps (B, C, H, W) to features (B, C)."""
        return tuple(self.dropout(features) for features in super().forward(maps))
