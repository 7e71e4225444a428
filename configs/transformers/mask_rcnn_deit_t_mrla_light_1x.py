# Mask R-CNN on DeiT-Tiny with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_deit_t_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16)))
