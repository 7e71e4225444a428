# Mask R-CNN on ResNet-101 with MRLA-base, 1x schedule (App. B.3).
_base_ = "./mask_rcnn_r101_1x.py"
model = dict(
    backbone=dict(type="MRLAResNet", layer_attention=dict(type="MRLABase", head_channels=32))
)
