# Faster R-CNN on a plain ResNet-101, 1x schedule: the baseline that the MRLA configs are compared
# with.
_base_ = ["mmdet::faster_rcnn/faster-rcnn_r101_fpn_1x_coco.py", "./_base_/mrla_mm.py"]
auto_scale_lr = dict(
    enable=True, base_batch_size=16
)  # the paper's batch; fewer images take a smaller step
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
