# Mask R-CNN on CeiT-S with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_ceit_s_1x.py"
model = dict(
    backbone=dict(
        layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16),
        init_cfg=dict(checkpoint="work_dirs/ceit_small_mrla_light_8xb128/epoch_300.pth"),
    )
)
