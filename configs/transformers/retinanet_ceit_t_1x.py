# RetinaNet on a plain CeiT-T with a simple feature pyramid, 1x schedule: the baseline of the MRLA
# configs.
_base_ = [
    "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py",
    "../_base_/mrla_mm.py",
    "../_base_/ceit.py",
    "../_base_/layer_decay.py",
]
model = dict(
    backbone=_base_.ceit_tiny.backbone,
    neck=dict(_base_.ceit_tiny.neck, strides=(8, 16, 32, 64, 128)),
)
optim_wrapper = _base_.layer_decay
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
