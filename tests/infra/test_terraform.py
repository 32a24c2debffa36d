"""Tests of infra/terraform: Terraform accepts it, AWS's stand-in makes it, and the role has exactly the store's rights.

Terraform finds its provider by its own configuration, or in the folder HOLDFAST_TERRAFORM_PLUGINS.
"""

import json
import os
import pwd
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
import yaml
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from holdfast.store import Store
from holdfast.store.s3 import S3Store
from tests.conftest import ROOT
from tests.support.cluster import matches, tolerates
from tests.support.faulty import forget_endpoints
from tests.support.s3_server import OneAtATime

FOLDER = ROOT / "infra" / "terraform"
POOLS = yaml.safe_load((ROOT / "infra" / "kubernetes" / "pools.yaml").read_text("utf-8"))
REGION = "us-east-1"
# The smallest part that S3 accepts.
PART_BYTES = 5 * 2**20

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


# ---- AWS's stand-in


class Recorder(OneAtATime):
    """A server for AWS that keeps of each request its method, path and query, and whether it copies an object."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str, set[str], bool]] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        query = set(parse_qs(environ["QUERY_STRING"], keep_blank_values=True))
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], query, is_copy))
        return super().__call__(environ, start_response)


# Queries that select no other action.
PLAIN = {"list-type", "prefix", "delimiter", "start-after", "continuation-token", "max-keys", "encoding-type", "x-id"}
PAGES = {"key-marker", "upload-id-marker", "max-uploads"}


def actions_of(method: str, path: str, query: set[str], is_copy: bool) -> set[str]:
    """Return the actions of IAM that a request to S3 takes, from AWS's table of actions.

    Raises:
        KeyError: this function doesn't know the request.
    """
    _, _, key = path.strip("/").partition("/")
    kind = frozenset(query - PLAIN - PAGES)
    if not key:
        return {
            ("GET", frozenset()): {"s3:ListBucket"},
            ("HEAD", frozenset()): {"s3:ListBucket"},
            ("GET", frozenset({"uploads"})): {"s3:ListBucketMultipartUploads"},
            ("POST", frozenset({"delete"})): {"s3:DeleteObject"},
        }[method, kind]
    return {
        ("GET", frozenset()): {"s3:GetObject"},
        ("HEAD", frozenset()): {"s3:GetObject"},
        ("PUT", frozenset()): {"s3:PutObject"},
        ("DELETE", frozenset()): {"s3:DeleteObject"},
        ("POST", frozenset({"uploads"})): {"s3:PutObject"},
        ("PUT", frozenset({"partNumber", "uploadId"})): {"s3:PutObject"},
        ("POST", frozenset({"uploadId"})): {"s3:PutObject"},
        ("DELETE", frozenset({"uploadId"})): {"s3:AbortMultipartUpload"},
    }[method, kind] | ({"s3:GetObject"} if is_copy else set())


@pytest.fixture(scope="module")
def aws() -> Iterator[Recorder]:
    """Yield a server for AWS; set its endpoint and credentials in the environment."""
    recorder = Recorder()
    server = make_server("127.0.0.1", 0, recorder, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
        yield recorder
    forget_endpoints()
    server.shutdown()
    server.server_close()


class QuietHandler(MotoRequestHandler):
    def log(self, *args: object) -> None:
        """Print nothing."""


# ---- the role's rights


def use_every_verb(store: S3Store) -> None:
    """Call every verb of a store, large files and failures included."""
    large = bytes(2 * PART_BYTES + 1)
    store.create("a/small", b"bytes")
    store.replace("a/small", b"different bytes")
    store.create("large", large)
    with store.creating("b/pieces") as writer:
        writer.write(large)
    with pytest.raises(ZeroDivisionError):
        fail_to_create(store, large)
    assert store.copy("large", "b/copied")
    assert store.read("a/small", 0, 9) == b"different"
    assert sum(map(len, store.pieces("large", PART_BYTES))) == len(large)
    assert list(store.fill("a/small", memoryview(bytearray(11)))) == [11]
    assert store.size_bytes("a/small") == 15
    assert store.modified("a/small") < datetime.now(UTC) + timedelta(hours=1)
    assert store.exists("a/small")
    assert not store.exists("a/none")
    assert store.existing().list() == ["a", "b", "large"]
    assert store.inside("b").list("", after="copied") == ["pieces"]
    store._upload(store._path("b/left"))
    assert store.sweep(datetime.now(UTC) + timedelta(hours=1)) == 1
    store.delete("large")
    store.delete_folder("b")
    assert store.list() == ["a"]


def fail_to_create(store: S3Store, large: bytes) -> None:
    with store.creating("b/failed") as writer:
        writer.write(large)
        raise ZeroDivisionError


def find_granted() -> set[str]:
    """Return the actions that the training pods' role allows, as written in role.tf."""
    text = (FOLDER / "role.tf").read_text("utf-8").partition('data "aws_iam_policy_document" "store"')[2]
    return set(re.findall(r'"(s3:[^"]+)"', text.partition("\n}\n")[0]))


def test_the_role_allows_exactly_the_requests_of_the_store(aws: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3.client("s3").create_bucket(Bucket="rights")
    aws.requests.clear()
    forget_endpoints()
    monkeypatch.setattr(S3Store, "part_bytes", PART_BYTES)
    use_every_verb(S3Store("s3://rights/runs"))
    assert set().union(*(actions_of(*request) for request in aws.requests)) == find_granted()


def test_every_verb_of_a_store_is_used(monkeypatch: pytest.MonkeyPatch, aws: Recorder) -> None:
    """A verb that is new in the contract fails this test until `use_every_verb` calls it."""
    verbs = {name for name, value in vars(Store).items() if callable(value) and not name.startswith("_")}
    text = "".join(use_every_verb.__code__.co_names)
    assert {verb for verb in verbs if verb not in text} == set()


# ---- Terraform


def run_terraform(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    changes = {
        "HOME": pwd.getpwuid(os.getuid()).pw_dir,  # Terraform's own configuration is there
        "CHECKPOINT_DISABLE": "1",  # ask no server of HashiCorp for a newer version
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return subprocess.run(
        ["terraform", *arguments], cwd=folder, env=os.environ | changes, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def copy_to(folder: Path, *left_out: str) -> Path:
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(".terraform", "*.tfstate*", *left_out))
    return folder


@pytest.fixture(scope="module")
def initialized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the provider's folder, as `terraform init` makes it in a working folder."""
    if not shutil.which("terraform"):
        pytest.skip("terraform is not installed")
    folder = copy_to(tmp_path_factory.mktemp("terraform") / "initialized")
    plugins = os.environ.get("HOLDFAST_TERRAFORM_PLUGINS")
    where = [f"-plugin-dir={plugins}"] if plugins else []
    done = run_terraform(folder, "init", "-input=false", "-no-color", "-lockfile=readonly", *where)
    if done.returncode:
        reason = next(iter(re.findall(r"Error: (.*)", done.stderr)), done.stderr)
        if plugins:
            pytest.fail(done.stderr)
        pytest.skip(f"terraform can't get its provider ({reason}); HOLDFAST_TERRAFORM_PLUGINS names a folder with it")
    return folder / ".terraform"


@pytest.fixture
def configuration(initialized: Path, tmp_path: Path) -> Path:
    """Return a copy of the configuration to change, with the provider."""
    folder = copy_to(tmp_path / "terraform")
    (folder / ".terraform").symlink_to(initialized)
    return folder


def test_terraform_accepts_it(configuration: Path) -> None:
    formatted = run_terraform(configuration, "fmt", "-check", "-recursive", "-diff", "-no-color")
    assert formatted.returncode == 0, formatted.stdout
    valid = run_terraform(configuration, "validate", "-no-color")
    assert valid.returncode == 0, valid.stdout + valid.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("capacity_type ", "capacity_tipe ", "capacity_tipe"),
        ("aws_iam_role.node.arn", "aws_iam_role.nod.arn", "undeclared resource"),
        ('"NO_SCHEDULE"', '"NO_SCHEDULES"', "effect"),
    ],
)
def test_a_typo_is_found(configuration: Path, right: str, wrong: str, message: str) -> None:
    nodes = configuration / "nodes.tf"
    text = nodes.read_text("utf-8")
    assert right in text
    nodes.write_text(text.replace(right, wrong, 1), "utf-8")
    found = run_terraform(configuration, "validate", "-no-color")
    assert found.returncode
    assert message in found.stderr + found.stdout


def test_a_wrong_format_is_found(configuration: Path) -> None:
    nodes = configuration / "nodes.tf"
    nodes.write_text(nodes.read_text("utf-8").replace('  node_group_name = "', '  node_group_name="', 1), "utf-8")
    assert run_terraform(configuration, "fmt", "-check").returncode


@pytest.fixture(scope="module")
def account(aws: Recorder) -> dict[str, Any]:
    """Return the variables for an account that has a cluster with two subnets."""
    cluster, iam = boto3.client("eks"), boto3.client("iam")
    subnets = [subnet["SubnetId"] for subnet in boto3.client("ec2").describe_subnets()["Subnets"]][:2]
    role = iam.create_role(RoleName="cluster", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    made = cluster.create_cluster(name="prod", roleArn=role, resourcesVpcConfig={"subnetIds": subnets})["cluster"]
    issuer = made["identity"]["oidc"]["issuer"]
    iam.create_open_id_connect_provider(Url=issuer, ClientIDList=["sts.amazonaws.com"], ThumbprintList=["a" * 40])
    return {"region": REGION, "bucket": "our-runs", "cluster": "prod", "subnet_ids": subnets}


def give(variables: dict[str, Any]) -> list[str]:
    return [f"-var={key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in variables.items()]


def test_wrong_variables_are_refused(configuration: Path, account: dict[str, Any]) -> None:
    wrong = {
        "region": "Frankfurt",
        "bucket": "Our.Runs",
        "noncurrent_days": 0,
        "subnet_ids": account["subnet_ids"][:1],
        "instance_types": ["g6.xlarge", "g5.xlarge"],
        "max_nodes": 0,
        "disk_gib": 8,
    }
    refused = run_terraform(configuration, "plan", "-no-color", "-input=false", *give(account | wrong))
    assert refused.returncode
    # Terraform breaks its messages into lines.
    said = re.sub(r"\W+", " ", refused.stderr)
    for message in (
        "A region looks like", "A dot would break TLS", "Give whole days", "at least two subnets", "one family",
        "not less than min_nodes", "Give 50 or more",
    ):  # fmt: skip
        assert message in said


def test_the_bucket_deletes_no_current_object(configuration: Path, account: dict[str, Any]) -> None:
    planned = run_terraform(configuration, "plan", "-no-color", "-input=false", "-out=plan", *give(account))
    assert planned.returncode == 0, planned.stderr
    resources = json.loads(run_terraform(configuration, "show", "-json", "plan").stdout)["planned_values"]
    (lifecycle,) = [
        each["values"]
        for each in resources["root_module"]["resources"]
        if each["type"] == "aws_s3_bucket_lifecycle_configuration"
    ]
    acts = [
        {
            f"{act}.{setting}": value
            for act in sorted(ACTS & rule.keys())
            for settings in rule[act]
            for setting, value in settings.items()
            if value
        }
        for rule in lifecycle["rule"]
    ]
    assert acts == [
        {"expiration.expired_object_delete_marker": True, "noncurrent_version_expiration.noncurrent_days": 30},
        {"abort_incomplete_multipart_upload.days_after_initiation": 7},
    ]


# What a rule of a bucket's lifecycle may do.
ACTS = {
    "abort_incomplete_multipart_upload",
    "expiration",
    "noncurrent_version_expiration",
    "noncurrent_version_transition",
    "transition",
}


def test_what_terraform_makes(initialized: Path, tmp_path: Path, account: dict[str, Any]) -> None:
    """Apply the configuration. AWS's provider reads a new lifecycle ten times in 50 s, so that is left out here."""
    folder = copy_to(tmp_path / "terraform", "lifecycle.tf")
    (folder / ".terraform").symlink_to(initialized)
    done = run_terraform(folder, "apply", "-auto-approve", "-no-color", "-input=false", *give(account))
    assert done.returncode == 0, done.stderr
    outputs = json.loads(run_terraform(folder, "output", "-json").stdout)
    values = {name: each["value"] for name, each in outputs.items()}
    assert values["store"] == "s3://our-runs"
    assert values["annotation"].startswith("eks.amazonaws.com/role-arn=arn:aws:iam::")
    assert values["pool_settings"].keys() <= POOLS["variables"]["properties"].keys()
    check_bucket()
    check_role()
    check_nodes()


def check_bucket() -> None:
    s3 = boto3.client("s3")
    assert s3.get_bucket_versioning(Bucket="our-runs")["Status"] == "Enabled"
    assert all(s3.get_public_access_block(Bucket="our-runs")["PublicAccessBlockConfiguration"].values())
    (rule,) = s3.get_bucket_encryption(Bucket="our-runs")["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    (statement,) = json.loads(s3.get_bucket_policy(Bucket="our-runs")["Policy"])["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def check_role() -> None:
    iam = boto3.client("iam")
    statements = iam.get_role_policy(RoleName="holdfast-run", PolicyName="store")["PolicyDocument"]["Statement"]
    assert {action for each in statements for action in each["Action"]} == find_granted()
    assert {each["Resource"] for each in statements} == {"arn:aws:s3:::our-runs", "arn:aws:s3:::our-runs/*"}
    assert iam.list_attached_role_policies(RoleName="holdfast-run")["AttachedPolicies"] == []
    (trust,) = iam.get_role(RoleName="holdfast-run")["Role"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Action"] == "sts:AssumeRoleWithWebIdentity"
    assert "system:serviceaccount:holdfast:holdfast-run" in trust["Condition"]["StringEquals"].values()


def check_nodes() -> None:
    """Assert that pods of the pool `gpu`, and no pods of `stable`, run on the nodes."""
    nodes = boto3.client("eks").describe_nodegroup(clusterName="prod", nodegroupName="holdfast-gpu-spot")["nodegroup"]
    assert nodes["capacityType"] == "SPOT"
    assert len(nodes["subnets"]) == 2
    assert len(nodes["instanceTypes"]) == 4
    labels = {"eks.amazonaws.com/capacityType": nodes["capacityType"]}  # EKS sets it
    taints = [each | {"effect": {"NO_SCHEDULE": "NoSchedule"}[each["effect"]]} for each in nodes["taints"]]
    assert taints
    defaults = {name: each.get("default") for name, each in POOLS["variables"]["properties"].items()}
    runs = {}
    for name, values in POOLS["pools"].items():
        pool = defaults | values
        tolerated = all(any(tolerates(each, taint) for each in pool["tolerations"]) for taint in taints)
        runs[name] = tolerated and matches(pool["node_affinity"], pool["node_selector"], labels)
    assert runs == {"stable": False, "gpu": True}
