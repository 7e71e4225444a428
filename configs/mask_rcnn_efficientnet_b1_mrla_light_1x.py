# Mask R-CNN on EfficientNet-B1 with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_efficientnet_b1_1x.py"
model = dict(
    backbone=dict(type="MRLAEfficientNet", layer_attention=dict(type="MRLALight", head_channels=8))
)
