"""Images of files, decoded once to 8 bits; many of them into a file that is mapped into memory."""

import hashlib
import io
import logging
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fedjax_inv import checks, platforms
from fedjax_inv.checks import UsageError

# For other formats, such as EPS, Pillow starts another program.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# The name of a file of them, or a path.
NAME = re.compile(r".+\.(png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
_TIFF_BITS = 258  # the tag BitsPerSample
_IN_MEMORY = 2**28  # bytes; more are mapped from a file
_BATCH = 1000  # images that threads decode before they are written
_LOG = logging.getLogger("fedjax_inv")
Decode = Callable[[Sequence[Path]], Any]  # files of M images -> the images [M, ...]


class Resizing(NamedTuple):
    """How images are resized."""

    size: tuple[int, int]  # (width, height) in pixels
    interpolation: str = "bilinear"  # nearest, bilinear, bicubic or lanczos
    crop: bool = False  # to the middle of the size's shape, in place of squeezing the whole

    def __call__(self, image: Any) -> Any:
        """Return a resized image of Pillow."""
        from PIL import Image, ImageOps

        method = Image.Resampling[self.interpolation.upper()]
        if self.crop:
            return ImageOps.fit(image, self.size, method)
        return image if image.size == self.size else image.resize(self.size, method)


class Files:
    """M images in files, each decoded when it is read: np.asarray(files[3:7]).

    As arrays they are [M, height, width, 3] uint8, resized.

    Raises:
      UsageError: where they are read, names the first file that is no such image.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, paths: Sequence[Path], resizing: Resizing) -> None:
        self.paths = np.array(paths, object)
        self.resizing = resizing
        width, height = resizing.size
        self.shape = len(paths), height, width, 3

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Any) -> "Files":
        """Some of them, rows [n] or a slice."""
        return Files(self.paths[rows], self.resizing)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The images, decoded by all cores."""
        del dtype, copy
        with warnings.catch_warnings(), ThreadPoolExecutor(platforms.cores()) as pool:
            _allow_large()
            return np.stack(
                [*pool.map(lambda path: _image_of(path, self.resizing, "RGB"), self.paths)]
            )


def resized(x: np.ndarray, resizing: Resizing) -> np.ndarray:
    """Return images [M, height, width, 3 or 1] uint8 in colour and resized."""
    from PIL import Image

    pictures = (Image.fromarray(image.squeeze(-1) if x.shape[-1] == 1 else image) for image in x)
    return np.stack([np.asarray(resizing(picture.convert("RGB"))) for picture in pictures])


def decoded(files: Sequence[Path], image_size: int | None = None) -> np.ndarray:
    """Decode M files: [M, height, width, 3] uint8, or [M, height, width, 1] if all are grey.

    Images are turned and converted as by `image_of`. They have one size, unless they are resized to
    `image_size` pixels a side. More than 256 MB are written to `$XDG_CACHE_HOME/fedjax_inv/images`,
    by default in ~/.cache, and mapped into memory. The file counts as long as it is whole and the
    names, sizes and times of the images are the same, and may be deleted.

    Raises:
      UsageError: names the first file that is no such image, or says that the disk is full.
    """
    sha = hashlib.sha256(repr(image_size).encode())
    for file in files:
        try:
            found = os.stat(file)
        except OSError:
            raise UsageError(str(file), ..., "must be an image, there is no such file") from None
        # The last is the time of any change, which programs do not set.
        times = found.st_mtime_ns, found.st_ctime_ns
        sha.update(repr((os.path.abspath(file), found.st_size, times)).encode())
    height, width, channels = image_of(files[0]).shape
    if image_size is not None:
        height = width = image_size
    pixels = len(files) * height * width

    def decode(out: BinaryIO) -> None:
        _decode(files, (width, height), image_size is not None, channels, out)

    if 3 * pixels <= _IN_MEMORY:
        out = io.BytesIO()
        decode(out)
        flat = np.frombuffer(out.getbuffer(), np.uint8)
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(cache).expanduser() / "fedjax_inv" / "images"
        flat = np.memmap(_cached(folder, sha.hexdigest()[:32], pixels, decode), np.uint8, "r")
    return flat.reshape(len(files), height, width, -1)


def _cached(folder: Path, digest: str, pixels: int, decode: Callable[[BinaryIO], None]) -> Path:
    """Return the file of decoded images, which is made unless it is there and whole.

    Its name tells its channels, and so its length.
    """
    of_length = {count * pixels: folder / f"{digest}.{count}.uint8" for count in (1, 3)}
    for length, path in of_length.items():
        if path.is_file() and path.stat().st_size == length:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    free = shutil.disk_usage(folder).free
    most = 3 * pixels
    text = f"images of {pixels:,} pixels take {most / 1e9:,.1f} GB"
    if most > free:
        text += f", must be fewer or smaller, as {folder} has {free / 1e9:,.1f} GB left; "
        raise UsageError(f"{text}$XDG_CACHE_HOME names another folder")
    _LOG.warning("%s in %s, where they are decoded once", text, folder)
    part = folder / f"{digest}.{platform.node()}.{os.getpid()}.part"
    try:
        with part.open("wb") as out:
            decode(out)
        return part.replace(of_length[part.stat().st_size])
    finally:
        part.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove the parts that processes of this machine left when they were killed."""
    for part in folder.glob(f"*.{platform.node()}.*.part"):
        try:
            os.kill(int(part.stem.rpartition(".")[2]), 0)  # asks whether there is such a process
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except PermissionError:  # it is somebody else's
            pass


def _decode(
    files: Sequence[Path], size: tuple[int, int], resizes: bool, channels: int, out: BinaryIO
) -> None:
    """Write images of (width, height) with so many channels, or with 3 if one needs them."""
    mode = "RGB" if channels == 3 else None
    resizing = Resizing(size) if resizes else None

    def pixels(file: Path) -> np.ndarray:
        found = _image_of(file, resizing, mode)
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
                    out.truncate()
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
        return _image_of(file, None if size is None else Resizing(size), mode)


def _allow_large() -> None:
    """Ignore Pillow's warning of large images; it refuses those of twice that size."""
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def _image_of(file: Path, resizing: Resizing | None, mode: str | None) -> np.ndarray:
    """Return `image_of`, but without its filter of warnings, which threads share."""
    from PIL import Image, ImageOps

    try:
        with Image.open(checks.regular(file), formats=_FORMATS) as opened:
            if (bits := _bits(opened)) > 8:
                raise ValueError(f"has {bits} bits a channel, must have at most 8")
            turned = ImageOps.exif_transpose(opened)
            mode = mode or ("L" if opened.mode in ("1", "L") else "RGB")
            image = turned.convert(mode)
            image = image if resizing is None else resizing(image)
    except Exception as error:  # of many types, such as of Pillow for damage and absurd sizes
        text = f"must be an image that can be decoded: {checks.one_line(error)}"
        raise UsageError(str(file), ..., text) from None
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _bits(opened: Any) -> int:
    """Return the bits of a channel in an opened file, of which Pillow may read 8 alone."""
    if opened.format == "PNG":
        with open(opened.filename, "rb") as file:
            return file.read(25)[24]  # of the header IHDR
    return max(opened.tag_v2.get(_TIFF_BITS, (8,))) if opened.format == "TIFF" else 8
