# Mask R-CNN on a plain EfficientNet-B1, 1x schedule: the baseline that the MRLA configs are
# compared with.
_base_ = "./mask_rcnn_efficientnet_b0_1x.py"
model = _base_.efficientnet_b1
