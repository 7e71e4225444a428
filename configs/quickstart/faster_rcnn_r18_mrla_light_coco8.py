# Faster R-CNN on ResNet-18 with MRLA-light, from scratch on eight COCO images at reduced size: a detector that is wired
# right learns them by heart. Make the annotation file with .dev_scripts/coco_subset.py.
_base_ = "../faster_rcnn_r50_mrla_light_1x.py"

norm_cfg = dict(type="GN", num_groups=8)  # eight images are too few for batch statistics
model = dict(
    backbone=dict(depth=18, norm_cfg=norm_cfg, norm_eval=False, frozen_stages=-1, init_cfg=None),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=128, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=128, feat_channels=128),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=128),
        bbox_head=dict(in_channels=128, fc_out_channels=256),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=128))),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200)),
)
annotations = "annotations/coco8.json"
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(256, 192), keep_ratio=True),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(256, 192), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
images = dict(ann_file=annotations, data_prefix=dict(img="train2017/"))
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=train_pipeline, **images))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **images))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file="data/coco/" + annotations)
test_evaluator = val_evaluator

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=5e-4, weight_decay=1e-4), clip_grad=dict(max_norm=10)
)
auto_scale_lr = dict(enable=False)
train_cfg = dict(max_epochs=200, val_interval=20)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(type="MultiStepLR", by_epoch=True, milestones=[140, 180], gamma=0.1),
]
default_hooks = dict(logger=dict(interval=2), checkpoint=dict(interval=20, max_keep_ckpts=2))
