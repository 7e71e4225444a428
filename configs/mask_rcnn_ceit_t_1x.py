# Mask R-CNN on a plain CeiT-T with a simple feature pyramid, 1x schedule: the baseline of the MRLA configs.
# CeiT's weights are published nowhere they could be fetched from: pre-train with configs/imagenet/ceit_tiny_8xb128.py.
_base_ = [
    "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "./_base_/mrla_mm.py",
    "./_base_/layer_decay.py",
]
model = dict(
    backbone=dict(
        _delete_=True,
        type="CeiT",
        arch="ceit-tiny",
        img_size=224,
        out_type="featmap",
        drop_path_rate=0.1,
        norm_eval=True,
        init_cfg=dict(type="Pretrained", checkpoint="work_dirs/ceit_tiny_8xb128/epoch_300.pth", prefix="backbone."),
    ),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=256),
)
optim_wrapper = dict(_delete_=True, **_base_.layer_decay)
auto_scale_lr = dict(enable=True, base_batch_size=16)
