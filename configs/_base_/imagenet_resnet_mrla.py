# The ResNet recipe with layer attention, which alone is dropped for a sample, with probability 0.2
# (App. B.1: survival 0.8). The network learns from scratch: nothing is frozen and no branch starts
# at zero.
_base_ = "./imagenet_resnet.py"
model = dict(
    backbone=dict(
        type="MRLAResNet",
        layer_attention=dict(type="MRLALight", head_channels=32),
        attention_drop_path=0.2,
        zero_init_attention=False,
        norm_eval=False,
        frozen_stages=-1,
    )
)
