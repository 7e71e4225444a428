"""mmcv's compiled ops in PyTorch and torchvision, with the signatures that ``mmcv.ops`` calls.

Arguments are tensors but for the names of numbers. Outputs are written into tensors that the caller
allocates, as mmcv does. Half precision is computed in float32 and rounded once, at the end.
"""

from mrla_mm.compat.ext_ops import attention, deform, focal, nms, roi

OPS = {
    function.__name__: function
    for function in (
        nms.nms,
        nms.softnms,
        roi.roi_align_forward,
        roi.roi_align_backward,
        focal.sigmoid_focal_loss_forward,
        focal.sigmoid_focal_loss_backward,
        deform.deform_conv_forward,
        deform.deform_conv_backward_input,
        deform.deform_conv_backward_parameters,
        deform.modulated_deform_conv_forward,
        deform.modulated_deform_conv_backward,
        attention.ms_deform_attn_forward,
        attention.ms_deform_attn_backward,
    )
}
# What mmcv.utils.collect_env prints as mmcv's compiler and CUDA version.
for name in ("get_compiler_version", "get_compiling_cuda_version"):
    OPS[name] = lambda: "none (stand-in ops of mrla_mm)"
