# RetinaNet on a plain CeiT-S with a simple feature pyramid, 1x schedule: the baseline of the MRLA
# configs.
_base_ = "./retinanet_ceit_t_1x.py"
model = _base_.ceit_small
