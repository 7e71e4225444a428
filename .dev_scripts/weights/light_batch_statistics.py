"""Light on plain weights, its norms with statistics of the batch, otherwise as light.py."""

_base_ = "./light.py"
model = dict(backbone=dict(attention_norm_eval=False))
