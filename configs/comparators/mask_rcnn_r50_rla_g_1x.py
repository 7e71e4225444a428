# Mask R-CNN on ResNet-50 with RLA_g, 1x schedule (Table 3).
_base_ = "../mask_rcnn_r50_1x.py"
model = dict(backbone=dict(type="mrla_mm.RLAResNet"))
