"""Images of files, decoded once to 8 bits; many of them into a file that is mapped into memory."""

import hashlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedjax_inv import checks, platforms
from fedjax_inv.checks import UsageError

# For other formats, such as EPS, Pillow starts another program.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Pillow's modes of more than 8 bits, which a conversion would clip.
_DEEP_MODES = {"I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
_IN_MEMORY = 2**28  # bytes; more are mapped from a file
_BATCH = 1000  # images that threads decode before they are written
_LOG = logging.getLogger("fedjax_inv")


def decoded(files: Sequence[Path], image_size: int | None) -> np.ndarray:
    """Decode M files: [M, height, width, 3] uint8, or [M, height, width, 1] if all are grey.

    Images are turned and converted as by `image_of`. They have one size, unless they are resized to
    `image_size` pixels a side. More than 256 MB are written to `$XDG_CACHE_HOME/fedjax_inv/images`,
    by default in ~/.cache, and mapped into memory. The file counts as long as the names, sizes and
    times of the images are the same, and may be deleted.

    Raises:
      UsageError: names the first file that is no such image, or says that the disk is full.
    """
    sha = hashlib.sha256(repr(image_size).encode())
    for file in files:
        try:
            found = os.stat(file)
        except OSError:
            raise UsageError(str(file), ..., "must be an image, there is no such file") from None
        sha.update(repr((os.path.abspath(file), found.st_size, found.st_mtime_ns)).encode())
    height, width, channels = image_of(files[0]).shape
    if image_size is not None:
        height = width = image_size
    num_bytes = 3 * len(files) * height * width
    out: BinaryIO
    if num_bytes <= _IN_MEMORY:
        out = io.BytesIO()
        _decode(files, (width, height), image_size is not None, channels, out)
        flat = np.frombuffer(out.getbuffer(), np.uint8)
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(cache).expanduser() / "fedjax_inv" / "images"
        path = folder / f"{sha.hexdigest()[:32]}.uint8"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            text = (
                f"{len(files):,} images of {width}x{height} pixels take {num_bytes / 1e9:,.1f} GB"
            )
            if num_bytes > free:
                text += f", must be fewer or smaller, as {folder} has {free / 1e9:,.1f} GB left; "
                raise UsageError(f"{text}$XDG_CACHE_HOME names another folder")
            _LOG.warning("%s in %s, where they are decoded once", text, folder)
            part = path.with_suffix(f".{os.getpid()}")
            try:
                with part.open("wb") as out:
                    _decode(files, (width, height), image_size is not None, channels, out)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        flat = np.memmap(path, np.uint8, "r")
    return flat.reshape(len(files), height, width, -1)


def _decode(
    files: Sequence[Path], size: tuple[int, int], resizes: bool, channels: int, out: BinaryIO
) -> None:
    """Write images of (width, height) with so many channels, or with 3 if one needs them."""
    mode = "RGB" if channels == 3 else None

    def pixels(file: Path) -> np.ndarray:
        found = _image_of(file, size if resizes else None, mode)
        if (height, width) != found.shape[:2]:
            text = f"is {found.shape[1]}x{found.shape[0]}, must be {width}x{height} as "
            others = {"first": (str(files[0]), ...), "size": ("image_size", ...)}
            raise UsageError(str(file), ..., text + "{first}, unless {size} is given", **others)
        return found

    width, height = size
    with warnings.catch_warnings(), ThreadPoolExecutor(platforms.cores()) as pool:
        _allow_large()
        for first in range(0, len(files), _BATCH):
            for found in pool.map(pixels, files[first : first + _BATCH]):
                if found.shape[-1] > channels:
                    out.seek(0)
                    return _decode(files, size, resizes, 3, out)
                out.write(found.tobytes())
    return None


def image_of(
    file: Path, size: tuple[int, int] | None = None, mode: str | None = None
) -> np.ndarray:
    """Decode a file of an image, turned as its EXIF data say: [height, width, 3 or 1] uint8.

    `size` is the (width, height) to which it is resized, if any; `mode` is "RGB" or "L", grey, and
    by default "RGB" unless the image is grey. Transparency is left out.
    """
    with warnings.catch_warnings():
        _allow_large()
        return _image_of(file, size, mode)


def _allow_large() -> None:
    """Ignore Pillow's warning of large images; it refuses those of twice that size."""
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def _image_of(file: Path, size: tuple[int, int] | None, mode: str | None) -> np.ndarray:
    """Return `image_of`, but without its filter of warnings, which threads share."""
    from PIL import Image, ImageOps

    try:
        with Image.open(checks.regular(file), formats=_FORMATS) as opened:
            if opened.mode in _DEEP_MODES:
                raise ValueError(f"has more than 8 bits a channel, its mode is {opened.mode}")
            turned = ImageOps.exif_transpose(opened)
            mode = mode or ("L" if opened.mode in ("1", "L") else "RGB")
            image = turned.convert(mode)
            image = image if size is None else image.resize(size, Image.Resampling.BILINEAR)
    except Exception as error:  # of many types, such as of Pillow for damage and absurd sizes
        text = f"must be an image that can be decoded: {checks.one_line(error)}"
        raise UsageError(str(file), ..., text) from None
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]
