# RetinaNet on EfficientNet-B1 with MRLA-light, 1x schedule.
_base_ = "./retinanet_efficientnet_b1_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=8)))
