# RetinaNet on ResNet-50 with RLA_g, 1x schedule (Table 2).
_base_ = "../retinanet_r50_1x.py"
model = dict(backbone=dict(type="mrla_mm.RLAResNet"))
