# Faster R-CNN on a ResNet-50 of a quarter of the width with MRLA-light, from scratch on images of
# 320 x 240 pixels: it learns a small data set on a CPU in minutes. Set your own classes and files.
_base_ = "../faster_rcnn_r50_mrla_light_1x.py"

model = dict(
    backbone=dict(
        base_channels=16,
        stem_channels=16,
        frozen_stages=-1,
        norm_eval=False,
        # From scratch, branches that start at zero would cost the first epochs.
        zero_init_attention=False,
        zero_init_residual=False,
        init_cfg=None,
    ),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=64, norm_cfg=dict(type="BN")),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, finest_scale=28),
        bbox_head=dict(in_channels=64, fc_out_channels=256),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=128))
    ),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200)),
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
train_dataloader = dict(batch_size=4, num_workers=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=1, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=1e-3, weight_decay=1e-4),
    clip_grad=dict(max_norm=10),
)
auto_scale_lr = dict(enable=False)
train_cfg = dict(max_epochs=10)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=10, convert_to_iter_based=True),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=1))
