# Mask R-CNN with MRLA-light in its Swin-T, 1x schedule, from Swin's ImageNet weights.
_base_ = ["mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py", "../_base_/mrla_mm.py"]
model = dict(backbone=dict(type="WithLayerAttention", backbone="SwinTransformer"))
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
