# Mask R-CNN on a plain CeiT-T with a simple feature pyramid, 1x schedule: the baseline of the MRLA
# configs.
_base_ = [
    "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "../_base_/mrla_mm.py",
    "../_base_/ceit.py",
    "../_base_/layer_decay.py",
]
model = _base_.ceit_tiny
optim_wrapper = _base_.layer_decay
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
