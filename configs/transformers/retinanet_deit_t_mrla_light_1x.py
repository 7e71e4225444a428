# RetinaNet on DeiT-Tiny with MRLA-light, 1x schedule.
_base_ = "./retinanet_deit_t_1x.py"
model = dict(backbone=dict(layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16)))
