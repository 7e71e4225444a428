"""A plain ResNet-50 of a quarter of the width on NEU-DET, 200 x 200 pixels, ten epochs."""

_base_ = "../bccd/plain.py"
classes = ("crazing", "inclusion", "patches", "pitted_surface", "rolled-in_scale", "scratches")
data_root = "data/neu_det/"
neu_det = dict(data_root=data_root, metainfo=dict(classes=classes))
model = dict(roi_head=dict(bbox_head=dict(num_classes=6)))
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(200, 200)),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
test_pipeline = train_pipeline[:3] + train_pipeline[4:]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline, **neu_det))
test_dataloader = dict(dataset=dict(pipeline=test_pipeline, **neu_det))
test_evaluator = dict(ann_file=data_root + "annotations/test.json")
