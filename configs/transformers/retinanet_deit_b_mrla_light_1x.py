# RetinaNet on DeiT-Base with MRLA-light, 1x schedule.
_base_ = "./retinanet_deit_b_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16)))
