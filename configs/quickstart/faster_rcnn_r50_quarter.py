# The plain twin of faster_rcnn_r50_quarter_mrla_light.py, to compare it with.
_base_ = "./faster_rcnn_r50_quarter_mrla_light.py"

model = dict(backbone=dict(layer_attention=None))
