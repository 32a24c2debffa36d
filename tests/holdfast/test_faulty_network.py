"""A store behind a network that fails: what the server has done counts, whether its answer arrived or not."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.store import open_store
from tests.faulty import KINDS, faulty_s3, use


def test_every_kind_of_fault_strikes_and_the_bytes_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_s3(0.3, seed=3) as proxy:
        store = open_store(f"{use(proxy, monkeypatch)}/runs")
        names = [f"commits/{number:08d}.json" for number in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.replace(name, name.encode()), names))
            assert list(pool.map(store.read, names)) == [name.encode() for name in names]
        assert store.list("commits") == [name.rpartition("/")[2] for name in names]
        assert set(proxy.faults) == set(KINDS)
