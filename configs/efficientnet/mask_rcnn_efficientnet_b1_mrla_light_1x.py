# Mask R-CNN on EfficientNet-B1 with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_efficientnet_b1_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=8)))
