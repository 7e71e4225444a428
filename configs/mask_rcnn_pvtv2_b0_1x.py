# Mask R-CNN on a plain PVTv2-B0, 1x schedule with PVTv2's AdamW: the baseline that the MRLA configs are compared with.
_base_ = ["mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", "./_base_/mrla_mm.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="PVTv2",
        arch="b0",
        drop_path_rate=0.1,
        init_cfg=dict(
            type="Pretrained", checkpoint="https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b0.pth"
        ),
    ),
    neck=dict(in_channels=[32, 64, 160, 256]),
)
optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=1e-4))
auto_scale_lr = dict(enable=True, base_batch_size=16)
