# RetinaNet on EfficientNet-B1 with MRLA-base, 1x schedule.
_base_ = "./retinanet_efficientnet_b1_1x.py"
model = dict(
    backbone=dict(type="MRLAEfficientNet", layer_attention=dict(type="MRLABase", head_channels=8))
)
