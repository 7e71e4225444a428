"""Light on plain weights, its norms starting with weights of 0.1, otherwise as light.py."""

_base_ = "./light.py"
custom_imports = dict(imports=["mrla_mm", "weights_hooks"])
custom_hooks = [dict(type="BranchNorms", weight=0.1)]
