# The generated shapes data set, with a schedule and logging sized for two CPU cores.
_base_ = [
    "mmdet::_base_/datasets/coco_instance.py",
    "mmdet::_base_/default_runtime.py",
    "./mrla_mm.py",
]

data_root = "data/shapes/"
source = dict(
    data_root=data_root,
    metainfo=dict(
        classes=("circle", "rectangle", "triangle", "star", "ring", "cross"),
        palette=[(31, 119, 180), (255, 127, 14), (44, 160, 44)]
        + [(214, 39, 40), (148, 103, 189), (227, 119, 194)],
    ),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(160, 160), keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
meta_keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(160, 160), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="PackDetInputs", meta_keys=meta_keys),
]
train_dataloader = dict(
    batch_size=4, num_workers=1, dataset=dict(pipeline=train_pipeline, **source)
)
val_dataloader = dict(batch_size=4, num_workers=1, dataset=dict(pipeline=test_pipeline, **source))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/instances_val2017.json")
test_evaluator = val_evaluator

randomness = dict(seed=0)  # of the figures in docs/get_started.md
max_epochs = 5
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=max_epochs, val_interval=2)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=10.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=max_epochs, convert_to_iter_based=True),
]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=50),
    checkpoint=dict(type="AtomicCheckpointHook", interval=1, max_keep_ckpts=2),
)
