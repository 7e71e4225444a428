"""Image files of any format and fault, through the loading step of a pipeline and through the demo."""

import random

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets.transforms import Resize
from PIL import Image

from mrla_mm.datasets.images import NamedImageErrors, NamedResizeErrors
from mrla_mm.errors import InputError

from ..conftest import load_tool
from .fuzzing import fuzz, judge

HEIGHT, WIDTH = 40, 64
PICTURE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
PICTURE[:, :16], PICTURE[:, 16:32], PICTURE[:20, 32:48], PICTURE[20:, 48:] = (
    (250, 30, 30),
    (30, 250, 30),
    200,
    (9, 9, 90),
)
GREY = np.asarray(Image.fromarray(PICTURE).convert("L"))[..., None].repeat(3, axis=2)
MODES = {
    "jpg": ("RGB", "L", "CMYK"),
    "png": ("RGB", "L", "LA", "RGBA", "P", "I;16", "1"),
    "gif": ("P",),
    "webp": ("RGB", "RGBA"),
    "bmp": ("RGB", "L"),
    "tif": ("RGB", "L", "F"),
}
DAMAGES = ["cut", "cut", "flip", "text", "empty", "zeros"]
KINDS = [(suffix, mode) for suffix, modes in MODES.items() for mode in modes]
CUT_IS_SEEN = ("jpg", "png", "gif", "webp", "bmp")


def save(path, mode, *, turned=None):
    if mode == "I;16":
        image = Image.fromarray(GREY[..., 0].astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(GREY[..., 0].astype(np.float32))
    else:
        image = Image.fromarray(PICTURE).convert(mode)
    options = {}
    if turned is not None:
        exif = Image.Exif()
        exif[0x0112] = turned
        options["exif"] = exif.tobytes()
    image.save(path, **options)


def load(path, height=HEIGHT, width=WIDTH, color_type="color"):
    results = dict(img_path=str(path), height=height, width=width)
    results = NamedImageErrors(LoadImageFromFile(color_type=color_type))(results)
    return NamedResizeErrors(Resize(scale=(96, 64), keep_ratio=True))(results), results["ori_shape"]


@pytest.mark.parametrize(("suffix", "mode"), KINDS)
def test_every_format_gives_three_channels_of_what_it_shows(suffix, mode, tmp_path):
    """Grey, palette, alpha, 16-bit and CMYK arrive as eight-bit BGR; floating-point TIFF is refused with its name."""
    path = tmp_path / f"image.{suffix}"
    save(path, mode)
    if mode == "F":
        with pytest.raises(InputError, match=str(path)):
            load(path)
        return
    shown = load_tool("demo").read_image(path)
    assert shown.shape == PICTURE.shape and shown.dtype == np.uint8
    assert load(path)[0]["img"].shape == (60, 96, 3)
    wanted = {"P": PICTURE, "CMYK": PICTURE, "RGB": PICTURE, "RGBA": PICTURE}.get(mode, GREY)
    difference = np.abs(shown[..., ::-1].astype(int) - wanted).mean()
    assert difference < {"P": 30, "1": 130}.get(mode, 6), "lossy formats and palettes come close, others are exact"


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_turned_image_is_refused_where_boxes_would_not_fit(suffix, tmp_path):
    """mmcv turns an image as EXIF says; COCO's boxes are of the stored pixels. The message has both ways out."""
    path = tmp_path / f"image.{suffix}"
    save(path, "RGB", turned=6)
    with pytest.raises(
        InputError, match=f'{path} has {HEIGHT} x {WIDTH} pixels.*color_type="color_ignore_orientation"'
    ):
        load(path)
    assert load(path, color_type="color_ignore_orientation")[1] == (HEIGHT, WIDTH)
    assert load(path, height=WIDTH, width=HEIGHT)[1] == (WIDTH, HEIGHT)
    assert load_tool("demo").read_image(path).shape == (WIDTH, HEIGHT, 3)


def test_another_size_is_refused(tmp_path):
    path = tmp_path / "image.png"
    save(path, "RGB")
    with pytest.raises(InputError, match=f"{WIDTH} x {HEIGHT} pixels, but the annotation file says 30 x 40"):
        load(path, height=40, width=30)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 400), (400, 1), (2, 3)])
def test_tiny_and_narrow_images(height, width, tmp_path):
    """A side may be one pixel; where resizing would leave none, the image is named."""
    path = tmp_path / "image.png"
    cv2.imwrite(str(path), np.full((height, width, 3), 9, np.uint8))
    error = judge("image: narrow", lambda: load(path, height, width), named=[path])
    assert (error is not None) == (max(height, width) == 400)


def test_damaged_file(tmp_path):
    """Files cut at any byte, with flipped bits, empty, or with another format's content under the name."""
    demo = load_tool("demo")

    @fuzz(60)
    @given(
        st.sampled_from(KINDS), st.sampled_from(["cut", "cut", "flip", "text", "empty", "zeros"]), st.integers(0, 2**32)
    )
    def check(kind, damage, seed):
        suffix, mode = kind
        rng, path = random.Random(seed), tmp_path / f"image.{suffix}"
        save(path, mode)
        data = bytearray(path.read_bytes())
        if damage == "cut":
            data = data[: rng.randrange(len(data) - 2)]
        elif damage == "flip":
            for _ in range(rng.randint(1, 20)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            data = {"text": b"not an image\n", "empty": b"", "zeros": bytes(len(data))}[damage]
        path.write_bytes(data)
        outcomes = [
            judge(f"image: {damage}, {where}", action, named=[path])
            for where, action in (("training", lambda: load(path)), ("demo", lambda: demo.read_image(path)))
        ]
        if damage in ("text", "empty", "zeros") or (damage == "cut" and suffix in CUT_IS_SEEN):
            assert all(outcomes), f"{damage} {suffix} {mode} of {len(data)} bytes was taken for an image"

    check()
