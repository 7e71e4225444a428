# Mask R-CNN on PVTv2-B0 with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_pvtv2_b0_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16)))
