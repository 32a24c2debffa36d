"""The provenance of a checkpoint in the form of SLSA 1.0, for tools that admit artifacts by their provenance.

Source: https://slsa.dev/spec/v1.0/provenance.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast import __version__
from holdfast.journal import Commit, Journal
from holdfast.journal.signature import STATEMENT_TYPE, SigningKey
from holdfast.proof.receipt.chain import AttemptFacts, Chain
from holdfast.proof.receipt.model import ALONE
from holdfast.proof.receipt.signed import Told
from holdfast.provenance.canonical import dump_json

SLSA_TYPE = "https://slsa.dev/provenance/v1"
# `holdfast/FORMAT.md` describes this type of build.
BUILD_TYPE = "urn:holdfast:training:v1"
BUILDER = "urn:holdfast:builder:v1"


def seal_provenance(journal: Journal, commit: Commit, told: Told, key: SigningKey) -> bytes:
    """Return a signed statement in SLSA's form about the files of a commit, or about the files of its export."""
    # Among the signed files a single file has the name `ALONE`. Here it gets the name of the model.
    files = {told.name if name == ALONE else name: sha256 for name, sha256 in told.files.items()}
    return dump_json(key.seal(dump_json(_state(journal, commit, files, told.chain)))) + b"\n"


def _state(journal: Journal, commit: Commit, files: Mapping[str, str], chain: Chain) -> dict[str, Any]:
    link = chain.commit
    record = {"name": f"commits/{link.commit:08d}.json", "digest": {"sha256": link.record_sha256}}
    attempts = [journal.read_attempt(number) for number in chain.attempts]
    started = min((each.began_at or each.created_at for each in attempts), default=commit.created_at)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(files.items())],
        "predicateType": SLSA_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"run": chain.run, "step": link.step, "settings": chain.settings[link.settings]},
                "internalParameters": {
                    "exported": chain.exported,
                    "machines": {str(number): facts.host for number, facts in chain.attempts.items()},
                    "lineage": {str(number): facts.lineage for number, facts in chain.attempts.items()},
                },
                "resolvedDependencies": list(_list_dependencies(chain)),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"holdfast": __version__}},
                "metadata": {
                    "invocationId": f"{chain.run}/{record['name']}",
                    "startedOn": started,
                    "finishedOn": commit.created_at,
                },
                "byproducts": [record],
            },
        },
    }


def _list_dependencies(chain: Chain) -> Iterator[dict[str, Any]]:
    """Yield each input of the chain's training once: code, data, packages, and an imported checkpoint."""
    seen: list[dict[str, Any]] = []
    for found in (each for facts in chain.attempts.values() for each in _list_of_attempt(facts)):
        if found not in seen:
            seen.append(found)
    yield from seen
    for identity in chain.settings.values():
        data = identity.get("data") or {}
        if isinstance(data, dict) and data.get("sha256"):
            yield {"name": "data", "digest": {"sha256": data["sha256"]}}
    for link in chain.chain:
        if link.origin:
            yield {"name": link.origin["source"], "digest": {"sha256": link.origin["sha256"]}}


def _list_of_attempt(facts: AttemptFacts) -> Iterator[dict[str, Any]]:
    for name, sha256 in facts.environment.get("source_bytes", {}).items():
        yield {"name": f"source {name}", "digest": {"sha256": sha256}}
    for name, file in facts.environment.get("files", {}).items():
        # Only the digest of a whole file may be stated. Of a large file only a few pieces were hashed, and an entry for
        # many files has the hash of their listing.
        is_whole = "sha256" in file and "files" not in file
        yield {"name": f"file {name}"} | ({"digest": {"sha256": file["sha256"]}} if is_whole else {"annotations": file})
    for name, version in facts.environment.get("packages", {}).items():
        yield {"uri": f"pkg:pypi/{name.lower()}@{version}"}
    for name in ("torch", "numpy", "accelerate", "torchdata"):
        if version := facts.environment.get(name):
            yield {"uri": f"pkg:pypi/{name}@{version}"}
