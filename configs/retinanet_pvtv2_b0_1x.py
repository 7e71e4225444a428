# RetinaNet on a plain PVTv2-B0, 1x schedule with PVTv2's AdamW: the baseline that the MRLA configs
# are compared with.
_base_ = [
    "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py",
    "./_base_/mrla_mm.py",
    "./_base_/pvtv2_b0.py",
]
model = dict(
    backbone=dict(_delete_=True, **_base_.pvtv2_b0), neck=dict(in_channels=[32, 64, 160, 256])
)
optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=1e-4))
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
