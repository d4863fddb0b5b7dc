"""Bounds of the pictures and sounds that a prompt may have. A helper process that decodes and whoever gives pixels to a
projector check the same ones."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ASPECT = 200
"""Maximum ratio of a picture's sides. Every row has one cell at least, so thin pictures have more cells than
`image_max_tokens` says; of the longest ones some kinds make no picture at all."""

MIN_SECONDS = 0.1
"""Minimum length of a sound: of one sample libmtmd ends the process, and of less than two frames some encoders do."""


NUM_DECODERS = 2
"""Number of helper processes that decode: while one does a team's picture, the other serves other teams."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds the media that one prompt may have."""

    max_side: int = 8192
    """Maximum width and height of a picture."""
    max_pixels: int = 32 << 20
    """Maximum pixels of a picture: libmtmd holds 15 bytes for each while it changes its size."""
    max_seconds: float = 600.0
    """Maximum length of a sound."""
    max_media: int = 32
    """Maximum pictures and sounds."""

    def picture_fault(self, width: int, height: int) -> str:
        """Return why a picture of this size is not read, and the remedy; empty if it is."""
        if width < 1 or height < 1:
            return "a picture has no pixels; send one that has"
        if max(width, height) > self.max_side or width * height > self.max_pixels:
            return (
                f"a picture of {width:,} x {height:,} pixels is more than the {self.max_side:,} for a side, or the "
                f"{self.max_pixels:,} in all, that are read; send a smaller one"
            )
        if max(width, height) > MAX_ASPECT * min(width, height):
            return (
                f"a picture of {width:,} x {height:,} pixels is more than {MAX_ASPECT} times as long as wide; "
                "cut it into parts"
            )
        return ""

    def sound_fault(self, seconds: float) -> str:
        """Return why a sound of this length is not read, and the remedy; empty if it is."""
        if MIN_SECONDS <= seconds <= self.max_seconds:
            return ""
        return (
            f"a sound of {seconds:,.2f} seconds is not read, only of {MIN_SECONDS} to {self.max_seconds:,.0f}; "
            "send a longer one, or cut it into parts"
        )
