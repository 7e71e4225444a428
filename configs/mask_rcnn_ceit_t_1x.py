# Mask R-CNN on a plain CeiT-T with a simple feature pyramid, 1x schedule: the baseline of the MRLA
# configs.
_base_ = [
    "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "./_base_/mrla_mm.py",
    "./_base_/ceit_tiny.py",
    "./_base_/layer_decay.py",
]
model = dict(
    backbone=dict(_delete_=True, **_base_.ceit_tiny),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=256),
)
optim_wrapper = dict(_delete_=True, **_base_.layer_decay)
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
