"""Files of pictures become the pixels that they show; those that are cut, too large or slow are refused by name."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.support.media_files import PICTURE_FORMS, chunk, corners, picture_file, png, with_orientation
from workers.media.bounds import MediaLimits
from workers.media.heads import MAX_SCANS
from workers.media.messages import Undecodable
from workers.media.pictures import decode_picture

LIMITS = MediaLimits(max_side=256, max_pixels=128 * 128)
LOSSLESS = ("PNG", "BMP", "GIF")


def shown(data: bytes) -> list[int]:
    """Return the colour of a file's first pixel."""
    return [int(part) for part in decode_picture(data, LIMITS)[0, 0]]


def refusal(data: bytes) -> str:
    with pytest.raises(Undecodable) as caught:
        decode_picture(data, LIMITS)
    return str(caught.value)


@pytest.mark.parametrize("form", PICTURE_FORMS)
def test_every_form_shows_its_colours_in_their_places(form: str) -> None:
    pixels = decode_picture(picture_file(corners(), form), LIMITS)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (32, 48, 3)
    assert pixels.flags.c_contiguous
    difference = np.abs(pixels.astype(int) - np.asarray(corners()).astype(int))
    assert difference.max() <= (0 if form in LOSSLESS else 255)
    assert np.median(difference) <= (0 if form in LOSSLESS else 2)


def test_a_picture_that_is_more_than_one_band_is_whole() -> None:
    image = Image.effect_noise((1024, 2500), 90)
    pixels = decode_picture(picture_file(image, "PNG"), MediaLimits())
    assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_picture_stands_as_its_camera_was_held(number: int, form: str) -> None:
    turned = {
        1: (),
        2: (Image.Transpose.FLIP_LEFT_RIGHT,),
        3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,),
        5: (Image.Transpose.TRANSPOSE,),
        6: (Image.Transpose.ROTATE_270,),
        7: (Image.Transpose.TRANSVERSE,),
        8: (Image.Transpose.ROTATE_90,),
    }[number]
    data = with_orientation(number, form)
    with Image.open(io.BytesIO(data)) as stored:
        expected = stored.convert("RGB")
    for turn in turned:
        expected = expected.transpose(turn)
    assert np.array_equal(decode_picture(data, LIMITS), np.asarray(expected))


@pytest.mark.parametrize("number", [0, 9, 65_535])
def test_an_orientation_that_there_is_not_is_none(number: int) -> None:
    assert decode_picture(with_orientation(number, "JPEG"), LIMITS).shape == (32, 48, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_is_left_out() -> None:
    data = picture_file(corners(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff nothing of a directory")
    assert decode_picture(data, LIMITS).shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, [255, 255, 255]),
        ("L", 100, [100, 100, 100]),
        ("LA", (100, 255), [100, 100, 100]),
        ("LA", (100, 0), [255, 255, 255]),
        ("RGB", (1, 2, 3), [1, 2, 3]),
        ("RGBA", (255, 0, 0, 255), [255, 0, 0]),
        ("RGBA", (255, 0, 0, 0), [255, 255, 255]),
        ("RGBA", (255, 0, 0, 128), [255, 127, 127]),
    ],
)
def test_every_mode_becomes_red_green_and_blue_on_white(
    mode: str, colour: int | tuple[int, ...], expected: list[int]
) -> None:
    assert shown(picture_file(Image.new(mode, (8, 8), colour), "PNG")) == expected


def test_a_palette_and_its_transparent_colour() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([9, 9, 9, 10, 20, 30])
    assert shown(picture_file(image, "PNG")) == [10, 20, 30]
    assert shown(picture_file(image, "GIF")) == [10, 20, 30]
    assert shown(picture_file(image, "PNG", transparency=1)) == [255, 255, 255]
    assert shown(picture_file(image, "GIF", transparency=1)) == [255, 255, 255]


def test_a_colour_that_stands_for_nothing_is_white() -> None:
    assert shown(picture_file(Image.new("RGB", (8, 8), (9, 8, 7)), "PNG", transparency=(9, 8, 7))) == [255, 255, 255]
    assert shown(picture_file(Image.new("L", (8, 8), 9), "PNG", transparency=9)) == [255, 255, 255]


def test_of_16_bits_the_upper_ones_are_shown() -> None:
    grey = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    pixels = decode_picture(picture_file(Image.fromarray(grey), "PNG"), LIMITS)
    assert np.array_equal(pixels[..., 1], grey >> 8)
    deep = png(2, 1, b"\0" + struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0, 0xFFFF, 0x00FF), bits=16)
    assert decode_picture(deep, LIMITS).tolist() == [[[0x12, 0x56, 0x9A], [0, 0xFF, 0]]]


def test_ink_and_grey_of_jpeg() -> None:
    assert shown(picture_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")) == [255, 0, 0]
    assert shown(picture_file(Image.new("L", (8, 8), 77), "JPEG")) == [77, 77, 77]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_picture(form: str) -> None:
    first, second = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    red, _, blue = shown(picture_file(first, form, save_all=True, append_images=[second]))
    assert red > 250
    assert blue < 5


@pytest.mark.parametrize("form", PICTURE_FORMS)
@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (128, 128, ""),
        (256, 64, ""),
        (64, 256, ""),
        (200, 1, ""),
        (1, 200, ""),
        (129, 128, "a picture of 129 x 128 pixels is more than the 256 for a side, or the 16,384 in all"),
        (257, 2, "a picture of 257 x 2 pixels is more than the 256 for a side"),
        (2, 257, "a picture of 2 x 257 pixels is more than the 256 for a side"),
        (201, 1, "a picture of 201 x 1 pixels is more than 200 times as long as wide; cut it into parts"),
    ],
)
def test_sizes_at_and_beyond_the_bounds(form: str, width: int, height: int, reason: str) -> None:
    data = picture_file(Image.new("RGB", (width, height)), form)
    if reason:
        assert refusal(data).startswith(reason)
    else:
        assert decode_picture(data, LIMITS).shape == (height, width, 3)


@pytest.mark.parametrize("how", [{}, {"progressive": True}])
@pytest.mark.parametrize("form", PICTURE_FORMS)
def test_a_file_that_is_cut_anywhere_is_refused(form: str, how: dict[str, bool]) -> None:
    data = picture_file(Image.effect_noise((64, 48), 90).convert("RGB"), form, **how)
    whole = decode_picture(data, LIMITS)
    for end in range(0, len(data), 7):
        try:
            pixels = decode_picture(data[:end], LIMITS)
        except Undecodable as refused:
            message = str(refused)
            assert "; send the whole file" in message or "; convert it" in message, message
        else:  # all pixels were there
            assert end > len(data) - 32
            assert np.array_equal(pixels, whole)


def test_what_is_no_picture_is_told_which_ones_are_read() -> None:
    assert refusal(b"") == "the picture's file is empty; send the whole file"
    for data in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"II*\0\x08\0\0\0",
        b"<svg/>",
        b"\0\0\1\0",
        b"P6 9 9",
    ):
        assert refusal(data) == "the picture is no PNG, JPEG, WebP, GIF or BMP file; convert it to one of them"


def test_a_jpeg_of_more_scans_than_any_encoder_makes() -> None:
    data = picture_file(corners(), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert f"more than the {MAX_SCANS} scans" in refusal(data[:-2] + scan * MAX_SCANS + data[-2:])
    assert decode_picture(data[:-2] + scan * 8 + data[-2:], LIMITS).shape == (32, 48, 3)


@pytest.mark.parametrize("marker", [0xC3, 0xC5, 0xC9, 0xCA])
def test_jpeg_codes_that_nobody_sends(marker: int) -> None:
    data = picture_file(corners(), "JPEG")
    assert "save it as usual" in refusal(data.replace(b"\xff\xc0", bytes([0xFF, marker]), 1))


def test_a_jpeg_of_several_pictures_shows_its_first() -> None:
    several = picture_file(Image.new("RGB", (16, 16), "red"), "MPO", save_all=True, append_images=[corners()])
    assert shown(several)[0] > 250


def test_heads_of_a_million_pieces_are_refused() -> None:
    gif = picture_file(Image.new("P", (8, 8)), "GIF")
    at = gif.index(b"\x2c")
    jpeg = picture_file(corners(), "JPEG")
    for data, what in (
        (png(8, 8, bytes(8 * 25), *[chunk(b"tEXt", b"")] * 100_000), "too many chunks"),
        (jpeg[:2] + b"\xff\xfe\0\2" * 100_000 + jpeg[2:], "4,096 segments"),
        (gif[:at] + b"\x21\xfe\x01a\0" * 100_000 + gif[at:], "4,096 blocks"),
        (gif[:at] + b"\x21\xfe" + b"\x01a" * 100_000 + b"\0" + gif[at:], "4,096 pieces"),
    ):
        assert what in refusal(data)


def test_a_compressed_bitmap_is_refused() -> None:
    data = picture_file(corners().convert("P"), "BMP")
    assert "save it as PNG" in refusal(data[:30] + struct.pack("<I", 1) + data[34:])


def test_texts_that_are_large_when_unpacked_are_not() -> None:
    profile = chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(100 << 20), 9))
    assert "damaged" in refusal(png(8, 8, bytes(8 * 25), profile))
