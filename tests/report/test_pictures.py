import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread

from indpriv.errors import InputError
from indpriv.report.figures import pictures_of


def pixels(uri):
    assert uri.startswith("data:image/png;base64,")
    return imread(io.BytesIO(base64.b64decode(uri.split(",")[1])))


@pytest.mark.parametrize("channels", [1, 3])
def test_each_picture_is_its_example(channels):
    images = np.linspace(-1, 1, 4 * channels * 6, dtype=np.float32).reshape(4, channels, 2, 3)
    found = pictures_of(SimpleNamespace(least_protected=(3, 1), most_protected=(0,)), images)
    assert list(found) == [3, 1, 0]
    for example_id, uri in found.items():
        drawn = np.moveaxis(pixels(uri)[..., :channels], -1, 0)
        bytes_of_greys = pytest.approx((images[example_id] + 1) / 2, abs=2 / 255)
        assert drawn == bytes_of_greys


@pytest.mark.parametrize(
    ("ids", "shape", "words"),
    [
        ((0,), (5, 30), "are not images with one or three channels"),
        ((0,), (5, 2, 4, 4), "are not images with one or three channels"),
        ((5,), (5, 1, 4, 4), "example id 5 is not a position in the 5 images"),
        (("a",), (5, 1, 4, 4), "example id 'a' is not a position"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ids, shape, words):
    with pytest.raises(InputError, match=words):
        pictures_of(
            SimpleNamespace(least_protected=ids, most_protected=()), np.zeros(shape, np.float32)
        )
