# Faster R-CNN on ResNet-50 with MRLA-light, 1x schedule (App. B.3).
_base_ = "./faster_rcnn_r50_1x.py"
model = dict(
    backbone=dict(type="MRLAResNet", layer_attention=dict(type="MRLALight", head_channels=32))
)
