import pytest
import torch

from indpriv.recording.norms import timing


@pytest.mark.parametrize(
    ("seconds", "largest", "size"),
    [
        (lambda n: 1e-3 + 1e-6 * n, 4096, 4096),  # calls cost most: the more at once, the better
        (
            lambda n: 1e-3 + 1e-3 * n,
            4096,
            256,
        ),  # takes a quarter of a second: calls no longer matter
        (lambda n: 1e-5 * n if n <= 64 else 2e-5 * n, 4096, 16),
        (lambda n: 1e-4 + (1e-5 if n <= 64 else 5e-5) * n, 4096, 64),
        (lambda n: 1e-6 * n, 10, 10),
    ],
)
def test_the_fastest_size(seconds, largest, size):
    found, per_example = timing.fastest_size(seconds, largest)
    assert found == size
    assert per_example == seconds(size) / size


def test_the_fastest_of_several_variants_in_spite_of_a_first_run_and_slow_spells(monkeypatch):
    seconds = {"first": [1, 9, 3, 3], "second": [8, 7, 7, 2], "third": [1, 4, 4, 4]}
    monkeypatch.setattr(timing, "_seconds", lambda run, device: 1e-3 * run())
    variants = [iter(values).__next__ for values in seconds.values()]
    assert timing.fastest(variants, torch.device("cpu")) == 1


def test_the_first_variant_may_be_slower_by_a_margin(monkeypatch):
    monkeypatch.setattr(timing, "_seconds", lambda run, device: 1e-3 * run())
    variants = [lambda: 1.1, lambda: 1.0]
    assert [timing.fastest(variants, None, margin=margin) for margin in (0.0, 0.05, 0.15)] == [
        1,
        1,
        0,
    ]


def test_a_variant_far_behind_and_a_long_one_are_not_run_again(monkeypatch):
    runs = {"far behind": [1, 1, 9.0], "quick": [1, 0.5, 0.5]}
    monkeypatch.setattr(timing, "_seconds", lambda run, device: run())
    left = {name: iter(values) for name, values in runs.items()}
    assert (
        timing.fastest(
            [lambda: 1e-3 * next(left["far behind"]), lambda: 1e-4 * next(left["quick"])], None
        )
        == 1
    )
    assert list(left["far behind"]) == [9.0]
    longer = iter([0.4, 0.3, 0.1])
    assert timing.best_seconds(longer.__next__, None) == 0.3
    assert list(longer) == [0.1]
