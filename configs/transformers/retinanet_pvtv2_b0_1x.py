# RetinaNet on a plain PVTv2-B0, 1x schedule with PVTv2's AdamW: the baseline that the MRLA configs
# are compared with.
_base_ = [
    "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py",
    "../_base_/mrla_mm.py",
    "../_base_/pvtv2.py",
]
model = _base_.pvtv2_b0
optim_wrapper = _base_.pvtv2_adamw
auto_scale_lr = dict(enable=True, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
