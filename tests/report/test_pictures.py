import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread

from indpriv.errors import InputError
from indpriv.report.pictures import pictures_of


def pixels(picture):
    assert picture.uri.startswith("data:image/png;base64,")
    return imread(io.BytesIO(base64.b64decode(picture.uri.split(",")[1])))


@pytest.mark.parametrize("channels", [1, 3])
def test_each_picture_is_its_example(channels):
    images = np.linspace(-1, 1, 4 * channels * 6, dtype=np.float32).reshape(4, channels, 2, 3)
    found = pictures_of(SimpleNamespace(least_protected=(3, 1), most_protected=(0,)), images)
    assert [picture.example_id for picture in found.least_protected] == [3, 1]
    assert [picture.example_id for picture in found.most_protected] == [0]
    for picture in (*found.least_protected, *found.most_protected):
        drawn = np.moveaxis(pixels(picture)[..., :channels], -1, 0)
        assert drawn == pytest.approx(
            (images[picture.example_id] + 1) / 2, abs=2 / 255
        )  # 256 greys, cut down, in bytes


@pytest.mark.parametrize(
    ("ids", "shape", "words"),
    [
        ((0,), (5, 30), "no images of one or three channels"),
        ((0,), (5, 2, 4, 4), "no images of one or three channels"),
        ((5,), (5, 1, 4, 4), "example id 5 is no position in the 5 images"),
        (("a",), (5, 1, 4, 4), "example id 'a' is no position"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ids, shape, words):
    with pytest.raises(InputError, match=words):
        pictures_of(
            SimpleNamespace(least_protected=ids, most_protected=()), np.zeros(shape, np.float32)
        )
