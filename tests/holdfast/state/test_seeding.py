"""A kept generator that the operating system has seeded gets the run's seed, or the line that seeds it is shown."""

from typing import Any

import numpy as np

from holdfast.state import as_stateful, list_unseeded, seed_unused


class Space:
    """Has a generator that the operating system seeds until `seed` is called, as a space of gymnasium has."""

    def __init__(self) -> None:
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        self._np_random = np.random.default_rng(seed)


class Env:
    def __init__(self) -> None:
        self.action_space, self.np_random = Space(), np.random.default_rng(3)


def find(value: Any, seed: int = 7) -> list[str]:
    return seed_unused(list_unseeded("env", value, as_stateful("env", value)), f"{seed}/env/0")


def test_a_space_that_nothing_has_drawn_from_gets_the_runs_seed() -> None:
    draws = []
    for seed in (7, 7, 8):
        env = Env()
        assert find(env, seed) == []
        draws.append([env.action_space._np_random.random(), env.np_random.random()])
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[2][0]
    assert draws[0][1] == draws[2][1] == np.random.default_rng(3).random()


def test_a_space_that_has_drawn_without_a_seed_is_named_and_seeded() -> None:
    env = Env()
    env.action_space._np_random.random()
    assert find(env) == ["env.action_space.seed(0)"]
    exec(find(env)[0], {"env": env})
    assert find(env) == []


def test_a_kept_generator_gets_the_runs_seed_or_is_named() -> None:
    one, other = np.random.default_rng(), np.random.default_rng()
    assert find(one) == find(other) == []
    assert one.random() == other.random()
    assert [each.random() for each in one.spawn(1)] == [each.random() for each in other.spawn(1)]
    drawn = np.random.default_rng()
    drawn.random()
    assert find(drawn) == ["env = numpy.random.default_rng(0)"]
    assert find(np.random.default_rng(3)) == find(np.random.RandomState()) == find({"n": 1}) == []
