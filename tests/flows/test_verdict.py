"""Machines that compute wrongly, planted: audits on other hosts find them, by commands as a person gives them."""

from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from holdfast.journal.audits import list_audits
from holdfast.machine.host import VARIABLE
from tests.conftest import Engine, RunFlow
from tests.support.flipping import faulty
from tests.support.lives import Lives
from tests.support.wrong_machine import FLIPS_AT, audit_on, copy_run, deployed_audit, journal_of, train_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Engine:
    """Return the engine of a run that a healthy machine has trained."""
    return train_on(tmp_path_factory.mktemp("healthy"), nursery, "a")


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Engine:
    """Return the engine of a run whose machine, a, computes wrongly from step 16 on."""
    return train_on(tmp_path_factory.mktemp("struck"), nursery, "a", **faulty("a", FLIPS_AT))


def test_a_machine_that_computes_wrongly_from_a_step_on_is_named(
    struck: Engine, healthy: Engine, tmp_path: Path
) -> None:
    engine = copy_run(struck, tmp_path)
    right = journal_of(healthy).read_commit(2).checkpoint_sha256
    assert journal_of(engine).read_commit(2).checkpoint_sha256 != right
    refused = audit_on(engine, "b", commit=3)
    assert refused["ask"]["commit"] == 2, "the gate refuses what the faulty machine has saved"
    first = audit_on(engine, "b")
    assert first["kind"] == "undecided"
    assert first["ask"]["repeat"] == ["a", "b"]
    found = audit_on(engine, "c")
    assert (found["kind"], found["host"], found["repeats"]) == ("machine", "a", None)
    assert found["step"] == FLIPS_AT
    assert found["component"] in ("gradient", "grad_norm")
    assert audit_on(engine, "a")["repeats"] is True
    done = engine.command("show", str(engine.run_folder))
    assert "commit 2: machine: a ended on different bytes than b and c" in done.stdout


def test_a_machine_whose_bit_flipped_once_is_named(healthy: Engine, tmp_path: Path, nursery: Lives) -> None:
    engine = train_on(tmp_path, nursery, "a", **faulty("a", FLIPS_AT, once=tmp_path / "struck"))
    assert (tmp_path / "struck").exists()
    assert audit_on(engine, "b")["kind"] == "undecided"
    found = audit_on(engine, "a")
    assert (found["kind"], found["host"], found["repeats"]) == ("machine", "a", False)


def test_a_faulty_machine_that_audits_is_named(healthy: Engine, tmp_path: Path) -> None:
    engine = copy_run(healthy, tmp_path)
    assert audit_on(engine, "b", **faulty("b", FLIPS_AT))["kind"] == "undecided"
    found = audit_on(engine, "c")
    assert (found["kind"], found["host"]) == ("machine", "b")


def read_artifact(prefect_api: dict[str, str]) -> str:
    """Return the newest artifact of an audit."""
    url, auth = prefect_api["PREFECT_API_URL"], prefect_api["PREFECT_API_AUTH_STRING"].partition(":")
    with httpx.Client(auth=auth[::2], trust_env=False) as client:
        found = client.post(f"{url}/artifacts/filter", json={"limit": 200}).raise_for_status().json()
    audits = [each for each in found if (each["key"] or "").endswith("-audits")]
    return str(max(audits, key=lambda each: each["created"])["data"])


@pytest.mark.server
def test_an_audit_asks_other_hosts_until_the_machine_is_named(
    struck: Engine, tmp_path: Path, run_flow: RunFlow, prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow runs wait for a worker; this test takes them as one would."""
    engine = copy_run(struck, tmp_path)

    def run(host: str, **parameters: object) -> str:
        for name, value in (faulty("a", FLIPS_AT) | {VARIABLE: host}).items():
            monkeypatch.setenv(name, value)
        return run_flow("audit", **({"store": engine.store, "run": "toy", "commit": 2} | parameters)).stderr

    with deployed_audit(prefect_api) as waiting:
        assert "asked for a replay of commit 2 of run toy on a different host" in run("b")
        (asked,) = waiting()
        parameters = {name: value for name, value in asked.parameters.items() if name != "store"}
        known = {"run": "toy", "commit": 2, "from_commit": None, "is_asked": True, "on_fault": "record", "configs": []}
        assert parameters == known | {"tries": 30}
        run("b", **parameters | {"tries": 1})  # this host has answered: it puts the flow run back
        *_, put_back = waiting()
        assert put_back.parameters["tries"] == 0
        assert (put_back.expected_start_time - datetime.now(UTC)).total_seconds() > 0
        run("a", **parameters | {"tries": 0})  # no other host has come: this one repeats what it had found
        *_, last = waiting()
        assert last.parameters["tries"] == 0
        assert "machine: a ended on different bytes than b and c" in run("c", **parameters)
        assert "verdict: `commit 2: machine: a ended on different bytes than b and c" in read_artifact(prefect_api)
        assert len(waiting()) == 3, "nothing more is asked"
        assert "machine: a ended" in run("b", **parameters), "it is decided, and not trained once more"
    assert list_audits(journal_of(engine)) == {2: [1, 2, 3]}
