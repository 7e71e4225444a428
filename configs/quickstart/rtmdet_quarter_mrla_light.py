# RTMDet on a CSPNeXt of a quarter of the width with MRLA-light, from scratch on images of 320 x 240
# pixels: it learns a small data set on a CPU in minutes. Set your own classes and files.
_base_ = "../anywhere/rtmdet_s_mrla_light_300e.py"

norm_cfg = dict(type="BN")
model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    backbone=dict(
        deepen_factor=0.67,
        widen_factor=0.25,
        norm_cfg=norm_cfg,
        # From scratch, branches that start at zero would cost the first epochs.
        zero_init_attention=False,
        init_cfg=None,
    ),
    neck=dict(in_channels=[64, 128, 256], out_channels=64, num_csp_blocks=1, norm_cfg=norm_cfg),
    bbox_head=dict(in_channels=64, feat_channels=64, norm_cfg=norm_cfg),
    test_cfg=dict(nms_pre=1000, max_per_img=100),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(320, 240), keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
meta_keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(320, 240), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs", meta_keys=meta_keys),
]
train_dataloader = dict(
    batch_size=8, num_workers=1, pin_memory=False, dataset=dict(pipeline=train_pipeline)
)
val_dataloader = dict(num_workers=1, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
tta_model = tta_pipeline = None  # mmdet's are for 640 x 640; --tta flips images of this size

train_cfg = dict(max_epochs=24, val_interval=6, dynamic_intervals=None)
optim_wrapper = dict(optimizer=dict(lr=2e-3))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.05, end=24, convert_to_iter_based=True),
]
custom_hooks = [
    dict(type="DatasetCheckHook"),
    dict(type="CheckpointCheckHook"),
    dict(type="mmdet.CheckInvalidLossHook", interval=1),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=1, max_keep_ckpts=1))
