# ResNet-50 with BA on ImageNet-1K in BA-Net's recipe (Table 6), from which the paper's detectors
# with BA start.
_base_ = ["./resnet50_ba_8xb32.py", "../_base_/banet_recipe.py"]
model = dict(head=dict(loss=_base_.banet_loss))
param_scheduler = _base_.banet_scheduler
