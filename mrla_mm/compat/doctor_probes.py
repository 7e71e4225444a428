"""Small computations with each op that detectors train with, whose answers are known.

Loaded by the doctor from its file, so it imports nothing at the top that may be broken.
"""

import math


def _probe_nms(torch, device):
    from mmcv.ops import nms

    boxes = torch.tensor([[0.0, 0, 3, 3], [0.0, 0, 3, 1]], device=device)  # IoU 1/3, 1/2 with the last pixel counted
    scores = torch.tensor([0.8, 0.9], device=device)
    return sum(10**i * len(nms(boxes, scores, 0.4, offset=i)[1]) for i in (0, 1)), 12


def _probe_soft_nms(torch, device):
    from mmcv.ops import soft_nms

    boxes = torch.tensor([[0.0, 0, 4, 4], [0.0, 0, 4, 2]], device=device)
    dets, _ = soft_nms(boxes, torch.tensor([0.9, 0.8], device=device), 0.3)
    return dets[1, 4].item(), 0.4


def _probe_roi_align(mode):
    def probe(torch, device):
        from mmcv.ops import roi_align

        ramp = torch.arange(16.0, device=device).expand(1, 1, 16, 16).clone().requires_grad_()
        out = roi_align(ramp, torch.tensor([[0.0, 2, 2, 10, 10]], device=device), (4, 4), 1.0, 2, mode, True)
        out.sum().backward()
        return out.mean().item() + ramp.grad.sum().item(), (5.5 if mode == "avg" else 6.0) + 16

    return probe


def _probe_focal(torch, device):
    from mmcv.ops import sigmoid_focal_loss

    logits = torch.zeros(1, 2, device=device, requires_grad=True)
    loss = sigmoid_focal_loss(logits, torch.tensor([0], device=device), 2.0, 0.25, None, "sum")
    loss.backward()
    slope = 0.25 * (
        math.log(2) + 0.5
    )  # p^2 (2 (1 - p) log 2 + p) at p = 1/2, for the negative and, negated, the positive
    return loss.item() + logits.grad.sum().item(), 0.25 * math.log(2) + slope * (0.75 - 0.25)


def _probe_deform(torch, device):
    from mmcv.ops import deform_conv2d

    x, weight = (torch.ones(1, 1, n, n, device=device, requires_grad=True) for n in (4, 3))
    out = deform_conv2d(x, torch.zeros(1, 18, 2, 2, device=device), weight)
    out.sum().backward()
    return out.sum().item() + weight.grad.sum().item(), 72


def _probe_modulated(torch, device):
    from mmcv.ops import modulated_deform_conv2d

    x, weight = (torch.ones(1, 1, n, n, device=device, requires_grad=True) for n in (4, 3))
    offset, mask = (torch.full((1, n, 2, 2), v, device=device) for n, v in ((18, 0.0), (9, 0.5)))
    out = modulated_deform_conv2d(x, offset, mask, weight, None)
    out.sum().backward()
    return out.sum().item() + weight.grad.sum().item(), 36


PROBES = {
    "nms": _probe_nms,
    "soft_nms": _probe_soft_nms,
    "roi_align (avg)": _probe_roi_align("avg"),
    "roi_align (max)": _probe_roi_align("max"),
    "sigmoid_focal_loss": _probe_focal,
    "deform_conv": _probe_deform,
    "modulated_deform_conv": _probe_modulated,
}
