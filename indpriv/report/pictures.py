"""Pictures of the most and the least protected examples, drawn only on request. Sensitive."""

import base64
import io
from typing import Any

import numpy as np
from matplotlib.image import imsave
from numpy.typing import NDArray

from indpriv.analysis.norms_over_training import Drivers
from indpriv.errors import InputError


def check_images(inputs: NDArray[np.float32]) -> None:
    """Raise InputError unless inputs is (n_examples, one or three channels, height, width)."""
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        raise InputError(
            f"examples of shape {inputs.shape[1:]} are not images with one or three channels, "
            "(channels, height, width); leave out show_examples or pictures"
        )


def pictures_of(drivers: Drivers, images: NDArray[np.float32]) -> dict[Any, str]:
    """PNGs as data URIs, by example id, of the examples at both ends.

    Args:
        drivers: whose ids are positions in images.
        images: (n_examples, channels, height, width); all are drawn on one scale, the range of
            those shown.

    Raises:
        InputError: not images, or ids that are not positions.
    """
    check_images(images)
    ids = [*drivers.least_protected, *drivers.most_protected]
    others = [each for each in ids if not isinstance(each, int) or not 0 <= each < len(images)]
    if others:
        raise InputError(
            f"example id {others[0]!r} is not a position in the {len(images)} images of the data "
            "set; leave out show_examples"
        )
    shown = images[np.array(ids, dtype=np.int64)]
    low, high = float(shown.min(initial=0.0)), float(shown.max(initial=1.0))
    return {each: _png((images[each] - low) / (high - low)) for each in ids}


def picture_pairs(pairs: NDArray[np.float32]) -> bytes:
    """A PNG of pictures above their reconstructions, on one scale.

    Args:
        pairs: (k, 2, channels, height, width).

    Raises:
        InputError: not images.
    """
    check_images(pairs[:, 0])
    low, high = float(pairs.min()), float(pairs.max())
    rows = [np.concatenate(list(pairs[:, row]), axis=2) for row in (0, 1)]
    scaled = (np.concatenate(rows, axis=1) - low) / max(high - low, 1e-12)
    return _png_bytes(scaled.astype(np.float32))


def _png(image: NDArray[np.float32]) -> str:
    """A data URI of an image (channels, height, width) with values in [0, 1]."""
    return data_uri(_png_bytes(image))


def data_uri(png: bytes) -> str:
    """A PNG as a page holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _png_bytes(image: NDArray[np.float32]) -> bytes:
    buffer = io.BytesIO()
    pixels = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
    imsave(buffer, np.clip(pixels, 0.0, 1.0), format="png", cmap="gray", vmin=0.0, vmax=1.0)
    return buffer.getvalue()
