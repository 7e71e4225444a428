# The detector that comes with this package: red and white blood cells and platelets, trained from
# scratch on the 205 training images of BCCD as docs/tutorial.md prepares them.
_base_ = "../faster_rcnn_r50_quarter_mrla_light.py"

classes = ("RBC", "WBC", "Platelets")
palette = [(31, 119, 180), (44, 160, 44), (255, 127, 14)]
cells = dict(
    data_root="data/bccd/",
    data_prefix=dict(img="JPEGImages/"),
    metainfo=dict(classes=classes, palette=palette),
)
model = dict(roi_head=dict(bbox_head=dict(num_classes=3)))
# Cells have no right way up.
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(320, 240), keep_ratio=True),
    dict(type="RandomFlip", prob=0.75, direction=["horizontal", "vertical", "diagonal"]),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    dataset=dict(ann_file="annotations/train.json", pipeline=train_pipeline, **cells)
)
val_dataloader = dict(dataset=dict(ann_file="annotations/val.json", **cells))
test_dataloader = dict(dataset=dict(ann_file="annotations/test.json", **cells))
val_evaluator = dict(ann_file="data/bccd/annotations/val.json")
test_evaluator = dict(ann_file="data/bccd/annotations/test.json")

randomness = dict(seed=0)
train_cfg = dict(max_epochs=12, val_interval=6)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", T_max=24, end=6, eta_min_ratio=0.01, convert_to_iter_based=True),
    dict(
        type="LinearLR",
        start_factor=1,
        end_factor=0.01,
        begin=6,
        end=12,
        convert_to_iter_based=True,
    ),
]
