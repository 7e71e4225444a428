"""The recipe of the Faster R-CNN tables in docs/results.md, tested after the last epoch."""

_base_ = "mrla_mm::quickstart/faster_rcnn_r50_quarter_mrla_light.py"
data_root = "data/bccd/"
bccd = dict(
    data_root=data_root,
    data_prefix=dict(img="JPEGImages"),
    metainfo=dict(classes=("RBC", "WBC", "Platelets")),
)
model = dict(roi_head=dict(bbox_head=dict(num_classes=3)))
train_dataloader = dict(dataset=dict(ann_file="annotations/train.json", **bccd))
test_dataloader = dict(dataset=dict(ann_file="annotations/test.json", **bccd))
test_evaluator = dict(ann_file=data_root + "annotations/test.json")
val_dataloader = val_evaluator = val_cfg = None
