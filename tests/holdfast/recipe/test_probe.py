"""Two probes are compared, exactly or with a tolerance."""

import pytest

from holdfast.recipe.probe import Probe, compare_probes

OLD, NEW = "a" * 64, "b" * 64


def probe(sha256: str = OLD, sample: tuple[float | None, ...] = (), **values: float | None) -> Probe:
    return Probe(sha256=sha256, values=values, sample=list(sample))


@pytest.mark.parametrize(
    ("saved", "found", "tolerance", "said"),
    [
        (probe(x=1.0), probe(x=2.0), 0.0, ""),  # the digest is of everything
        (probe(sample=(1.0,)), probe(sample=(9.0,)), 1e-3, ""),
        (probe("", x=1.0), probe(NEW, x=2.0), 0.0, ""),  # the recipe has got a probe
        (probe(OLD, x=1.0), probe("", x=2.0), 0.0, ""),  # or lost it
        (probe("", loss_window=1.0), probe("", loss_window=2.0), 0.0, ""),
        (
            probe(),
            probe(NEW),
            0.0,
            "the probe gives a different result than at the save (a difference of 0, relative to its largest number)",
        ),
        (probe(sample=(4.0,)), probe(NEW, (3.0,)), 0.0, "(a difference of 0.25, relative to its largest number)"),
        (probe(sample=(4.0,)), probe(NEW, (3.0, 3.0)), 0.0, "the probe gives a different result than at the save"),
        (probe(sample=(4.0,)), probe(NEW, (3.0,)), 0.25, ""),
        (
            probe(sample=(4.0,)),
            probe(NEW, (3.0,)),
            0.2,
            "differs by 0.25, relative to its largest number; 0.2 is allowed",
        ),
        (probe(sample=(-4.0,)), probe(NEW, (-5.0,)), 0.2, "differs by 0.25, relative"),
        (probe(sample=(0.0,)), probe(NEW, (0.5,)), 0.25, "differs by 0.5, relative"),
        (probe(sample=(100.0, 1.0)), probe(NEW, (100.0, 2.0)), 0.01, ""),
        (probe(x=4.0), probe(NEW, x=3.0), 0.2, "differs by 0.25, relative"),
        (probe(x=4.0, y=1.0), probe(NEW, x=4.0, z=9.0), 0.2, ""),
        (probe(loss_window=4.0), probe(NEW, loss_window=3.0), 0.2, ""),  # it is of the steps, not of the model
        (probe(sample=(1.0, None)), probe(NEW, (1.0, None)), 0.2, ""),  # health complains of it
        (probe(sample=(1.0, None)), probe(NEW, (1.0, 1.0)), 0.2, "can't be compared with the saved one"),
        (probe(sample=(1.0,)), probe(NEW, (1.0, 1.0)), 0.2, "can't be compared with the saved one"),
        (probe(x=1.0), probe(NEW, x=None), 0.2, "can't be compared with the saved one"),
    ],
)
def test_two_probes_are_compared(saved: Probe, found: Probe, tolerance: float, said: str) -> None:
    difference = compare_probes(saved, found, tolerance)
    assert said in difference
    assert bool(said) == bool(difference)
