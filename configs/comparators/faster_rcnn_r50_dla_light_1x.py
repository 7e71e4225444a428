# Faster R-CNN on ResNet-50 with DLA-light, 1x schedule.
_base_ = "../faster_rcnn_r50_1x.py"
model = dict(backbone=dict(type="MRLAResNet", layer_attention=dict(type="mrla_mm.DLALight")))
