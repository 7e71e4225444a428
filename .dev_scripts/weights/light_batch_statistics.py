"""Light on plain weights, its norms with statistics of the batch, otherwise as light.py."""

_base_ = "./light.py"
custom_imports = dict(imports=["mrla_mm", "weights_hooks"])
custom_hooks = [dict(type="BranchNorms", batch_statistics=True)]
