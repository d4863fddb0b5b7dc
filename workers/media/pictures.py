"""Decodes pictures with Pillow. Imported by the helper process only."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from workers.media.bounds import MediaLimits
from workers.media.heads import Form, read_head
from workers.media.messages import Undecodable

READERS: dict[Form, type[ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
"""Classes that are used directly: `Image.open` would try all that Pillow has, and take a JPEG of several pictures for
another form."""

BAND_PIXELS = 1 << 20
"""Pixels that are brought to red, green and blue at a time, so that few copies of a picture are in memory at once."""

ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""

FAULTS = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError),
    *(IndexError, KeyError, TypeError, OverflowError, AttributeError, NotImplementedError, RuntimeError),
)
"""Errors that Pillow raises over files that are cut, damaged or hostile."""

WHITE = (255, 255, 255, 255)

Pixels = NDArray[np.uint8]


def decode_picture(data: bytes, limits: MediaLimits) -> Pixels:
    """Return the pixels of a file's first picture, upright, on white: contiguous uint8 [height, width, 3].

    Raises Undecodable, and MemoryError."""
    head = read_head(data)
    if fault := limits.picture_fault(head.width, head.height):
        raise Undecodable(fault)
    try:
        with READERS[head.form](BytesIO(data)) as image:
            if image.size != (head.width, head.height):
                raise Undecodable(f"the {head.form} file contradicts itself about its size; encode it anew")
            image.load()
            return _upright(image, _orientation(image))
    except FAULTS:
        message = f"the {head.form} file is cut off or damaged; send the whole file, or encode it anew"
        raise Undecodable(message) from None


def _orientation(image: Image.Image) -> int:
    """Return how the picture is turned, 1 to 8 as EXIF counts; 1 is upright, and stands for what can't be read."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except FAULTS:
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(image: Image.Image, orientation: int) -> Pixels:
    """Return the picture's red, green and blue, turned so that it is upright."""
    width, height = image.size
    pixels = np.empty((width, height, 3) if orientation >= 5 else (height, width, 3), np.uint8)
    as_stored = _as_stored(pixels, orientation)
    rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        as_stored[top:bottom] = np.asarray(_coloured(image.crop((0, top, width, bottom))))
    return pixels


def _as_stored(pixels: Pixels, orientation: int) -> Pixels:
    """Return a view of the upright pixels, in which they lie as they are stored. Source: EXIF 2.32, 4.6.4 A."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels


def _coloured(band: Image.Image) -> Image.Image:
    """Return rows of a picture in red, green and blue, on white where it is transparent."""
    if band.mode.startswith("I"):  # 16 bits of grey, of which the upper ones count
        return Image.fromarray((np.asarray(band).astype(np.int32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if not band.has_transparency_data:
        return band.convert("RGB")
    band = band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", band.size, WHITE), band).convert("RGB")


def warm_up(limits: MediaLimits) -> None:
    """Decode a small picture of each form, so that all is loaded that Pillow loads when it is first needed."""
    Image.MAX_IMAGE_PIXELS = limits.max_pixels
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for form in READERS:
        file = BytesIO()
        picture = Image.new("P" if form == "GIF" else "RGB", (16, 16))
        picture.save(file, form, **({} if form in ("GIF", "BMP") else {"exif": exif}))
        decode_picture(file.getvalue(), limits)
