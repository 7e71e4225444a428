# RetinaNet on DeiT-Small with MRLA-light, 1x schedule.
_base_ = "./retinanet_deit_s_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16)))
