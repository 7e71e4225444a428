# Mask R-CNN on DeiT-Small with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_deit_s_1x.py"
model = dict(
    backbone=dict(type="MRLAViT", layer_attention=dict(type="MRLALight", head_channels=16))
)
