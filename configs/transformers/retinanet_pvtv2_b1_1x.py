# RetinaNet on a plain PVTv2-B1, 1x schedule: the baseline that the MRLA configs are compared with.
_base_ = "./retinanet_pvtv2_b0_1x.py"
model = _base_.pvtv2_b1
