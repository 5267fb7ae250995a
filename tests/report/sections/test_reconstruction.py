"""The section on reconstruction, and the screen of its commands."""

import numpy as np
import pytest
from indpriv.report.screens.reconstruction import print_reconstruction
from rich.console import Console

from indpriv.analysis.reconstruction import reconstruction_of
from indpriv.report.document import Callout, plain
from indpriv.report.pictures import data_uri
from indpriv.report.renderers.html import render_html
from indpriv.report.sections.reconstruction import reconstruction
from reconstructions import scores


def section_of(summary, found):
    return reconstruction(summary.replace(reconstruction=(found,)))


def test_there_is_no_section_without_reconstructions(summary):
    assert reconstruction(summary) is None


@pytest.mark.parametrize(("named", "above"), [(4, False), (60, True)])
def test_more_than_the_ceiling_is_a_finding(summary, named, above):
    found = reconstruction_of(scores(np.arange(200) < named, 1.0), np.linspace(1, 2, 200))
    section = section_of(summary, found)
    assert any(isinstance(block, Callout) for block in section.blocks) == above
    row = section.blocks[0].rows[0]
    assert [plain(cell) for cell in row.cells[1:4]] == [
        f"{named / 2:.1f} %",
        "0.5 to 5.0 %" if named == 4 else "23.7 to 36.9 %",
        "9.3 %",
    ]
    (entry,) = section.screen
    assert entry.blocks[0].style == ("alarm" if above else "")


def test_pictures_are_shown_only_where_the_page_is_given_them(summary):
    found = reconstruction_of(scores(np.arange(200) < 4, 1.0), np.linspace(1, 2, 200))
    changed = summary.replace(reconstruction=(found,))
    uri = data_uri(b"a picture")
    assert f'src="{uri}"' in render_html(changed, reconstructed={"row": uri})
    assert "below, what was reconstructed" not in render_html(changed)


def test_a_bin_above_its_ceiling_is_a_finding_on_the_first_screen(summary):
    epsilon = np.repeat([1.0, 2.0, 3.0, 4.0], 250)
    found = reconstruction_of(scores(np.arange(1000) >= 890, 1.0), epsilon)
    assert not found.above_ceiling
    assert found.bins[-1].above_ceiling
    section = section_of(summary, found)
    assert any(isinstance(block, Callout) for block in section.blocks)
    assert section.screen[0].blocks[0].style == "alarm"


def test_the_screen_names_attack_and_ceiling(capsys):
    print_reconstruction([reconstruction_of(scores(np.arange(200) < 4, 1.0))], Console(width=150))
    shown = capsys.readouterr().out
    assert "An attack" in shown
    assert "9.3 %" in shown
