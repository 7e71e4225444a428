# Mask R-CNN on a plain EfficientNet-B0, 1x schedule: the baseline that the MRLA configs are
# compared with.
_base_ = [
    "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "../_base_/mrla_mm.py",
    "../_base_/efficientnet.py",
]
model = _base_.efficientnet_b0
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
