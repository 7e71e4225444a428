"""Batches of any shape, layout and kind: a backbone works on them or says what it expects."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrla_mm import backbones
from mrla_mm.attention import MRLALight
from mrla_mm.necks import SimpleFeaturePyramid

from .fuzzing import fuzz, judge
from .test_arguments import BACKBONES

SIDE = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, *range(30, 71)])
BATCHES = st.fixed_dictionaries(
    dict(
        batch=st.sampled_from([0, 1, 1, 2]),
        channels=st.sampled_from([3] * 16 + [1, 0, 4]),
        height=SIDE,
        width=SIDE,
        layout=st.sampled_from(["contiguous", "channels_last", "strided", "expanded", "flipped", "transposed"]),
        dtype=st.sampled_from([torch.float32] * 16 + [torch.uint8, torch.int64, torch.bool, torch.complex64]),
        kind=st.sampled_from(["4d"] * 24 + ["3d", "5d", "flat"]),
        training=st.booleans(),
    )
)


def draw(batch, channels, height, width, layout, dtype, kind, training):
    shape = {"4d": (batch, channels, height, width), "3d": (channels, height, width), "flat": (batch, channels)}
    x = torch.rand(shape.get(kind, (batch, channels, 2, height, width)))
    if x.dim() == 4:
        x = {
            "contiguous": lambda: x,
            "channels_last": lambda: x.contiguous(memory_format=torch.channels_last),
            "strided": lambda: torch.rand(batch, channels, 2 * height, 2 * width)[:, :, ::2, ::2],
            "expanded": lambda: torch.rand(1, channels, height, width).expand(batch, -1, -1, -1),
            "flipped": lambda: x.flip(-1)[:, :, :, :],
            "transposed": lambda: torch.rand(batch, channels, width, height).transpose(2, 3),
        }[layout]()
    return x.to(dtype)


@cache
def model_of(name):
    torch.manual_seed(0)
    # torch 2.11 (oneDNN, AVX2) writes past the end of memory in the weights' gradient of a strided 1 x 1 convolution of
    # two to seven channels whose maps are channels-last: plain PyTorch, and narrower than any real model.
    wide = dict(base_channels=8) if name == "MRLAResNet" else {}
    model = getattr(backbones, name)(**BACKBONES[name][1] | wide, zero_init_attention=False)
    model.init_weights()
    return model


def run(model, x, training):
    model.train(training)
    outs = model(x)
    assert all(torch.isfinite(out).all() for out in outs)
    if training and len(x):
        sum(out.sum() for out in outs).backward()


@pytest.mark.parametrize("name", BACKBONES)
def test_backbone_input(name):
    @fuzz(25)
    @given(BATCHES)
    def check(drawn):
        x = draw(**drawn)
        words = [str(tuple(x.shape)), str(x.dtype), f"{drawn['height']} x {drawn['width']}", "more than 1 value per"]
        error = judge(f"{name}: batches of images", lambda: run(model_of(name), x, drawn["training"]), named=words)
        sound = x.dim() == 4 and x.shape[1] == 3 and x.is_floating_point() and min(x.shape[2:]) >= 32
        assert not (sound and error), f"{tuple(x.shape)} {drawn} was refused: {error}"

    check()


@fuzz(25)
@given(BATCHES)
def test_attention_input(drawn):
    x = draw(**drawn | dict(channels=drawn["channels"] * 4))
    attention = MRLALight(12, head_channels=4)
    judge("MRLALight: feature maps", lambda: attention(x, x)[0].sum(), named=[str(tuple(x.shape)), str(x.dtype)])


@fuzz(25)
@given(BATCHES)
def test_pyramid_input(drawn):
    x = draw(**drawn | dict(channels=drawn["channels"] * 4))
    neck = SimpleFeaturePyramid(12, 2)
    judge("SimpleFeaturePyramid: feature maps", lambda: neck((x,)), named=[str(tuple(x.shape)), str(x.dtype)])
