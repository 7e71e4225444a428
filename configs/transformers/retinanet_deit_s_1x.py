# RetinaNet on a plain DeiT-Small with a simple feature pyramid, 1x schedule: the baseline of the
# MRLA configs.
_base_ = "./retinanet_deit_t_1x.py"
model = _base_.deit_small
