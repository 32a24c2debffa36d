"""The fields of a configuration, in sections. Each field has its bounds, and below it a docstring as its description.

Editors show the description; `describe_fields` returns it for the page of all settings and for Prefect's form.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from holdfast.config.cells import check_importable
from holdfast.config.descriptions import describe_fields
from holdfast.config.earlier import read_earlier
from holdfast.config.limits import (
    Count,
    Processes,
    Seconds,
    check_plain,
)
from holdfast.config.metrics import read_metrics_target
from holdfast.config.steps import EXPECTED, Steps
from holdfast.errors import ConfigError
from holdfast.store.contract import TEMP_MARK
from holdfast.store.opening import CREDENTIALS_REFUSED, holds_credentials

DEFAULT_SEED = 1234
DEFAULT_STORE = "runs"
PART_BYTES = 256 * 2**20
NEAR_BYTES = 100 * 10**9
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
FUNCTION = r"^([A-Za-z_][\w.]*|[^:]*[\w-]\.py):[A-Za-z_][\w.]*$"
CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
POOL = r"^[A-Za-z0-9][\w .-]*$"
MEANINGS = {
    NAME: "expected letters, digits, '.', '_' and '-', at most 100 of them, and a letter or a digit first",
    FUNCTION: "expected module:function or file.py:function",
    CLASS: "expected module:Class",
    POOL: "expected letters, digits, '.', '_', '-' and spaces, and a letter or a digit first",
}


FieldClass = Literal["identity", "schedule", "operational"]


@dataclass(frozen=True)
class Classed:
    """A field's class, in the annotation of the field or of its table. It decides whether a run accepts a new value.

    Attributes:
        of: ``identity`` for fields that change the mathematics, ``schedule`` for fields that set the length of
            training, ``operational`` for all others.
    """

    of: FieldClass


IDENTITY, SCHEDULE, OPERATIONAL = Classed("identity"), Classed("schedule"), Classed("operational")


def expected(kinds: str) -> WrapValidator:
    """Return an annotation for a field of several types, whose wrong value raises one error instead of several."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"expected {kinds}") from None

    return WrapValidator(check)


class Section(BaseModel):
    """A table of the configuration, which refuses unknown keys, and values that JSON or a path can't contain."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: object, info: ValidationInfo) -> object:
        check_plain(value, is_own=info.field_name != "settings")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema for Prefect's form: each field has a title and its docstring, without markup."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        own["description"] = own.get("description", "").replace("`", "")
        for name, text in describe_fields(cls).items():
            own["properties"][name]["description"] = text
        # without a title in the schema, as for a table or an unset field, the form shows "Field"
        for name, field in own["properties"].items():
            field.setdefault("title", name.replace("_", " ").title())
        return schema


class ChunkLength(Section):
    """The number of steps that a chunk trains before its checkpoint. The number never changes the trained bytes."""

    steps: Annotated[
        Literal["auto"] | Annotated[Count, Field(ge=1)] | None, expected('a number of steps, at least 1, or "auto"')
    ] = None
    """Number of steps of a chunk. A chunk also ends at the end of an epoch. auto: Holdfast chooses the length during
    training, by the cost of saves and the rate at which machines are lost. chunk = "auto" is short for
    chunk.steps = "auto".
    """
    epochs: Count | None = Field(default=None, ge=1)
    """Number of epochs of a chunk; 1 if steps and epochs are unset. With steps = "auto", a chunk ends with every
    n-th epoch.
    """

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if isinstance(self.steps, int) and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        return self

    @property
    def is_auto(self) -> bool:
        """Return whether Holdfast chooses the length during training."""
        return self.steps == "auto"

    def next_stop(
        self, start: int, steps_per_epoch: int, total_steps: int, auto_steps: int = 1, marks: Sequence[int] = ()
    ) -> int:
        """Return the last step of a chunk: where its length, its epoch or the run ends, whichever comes first.

        Automatic chunks end with epochs as far as possible: a long epoch is cut into equal chunks, and several short
        epochs form one chunk. So a chunk has between two thirds of ``auto_steps`` and one and a half times
        ``auto_steps``. Exceptions are a chunk that a mark or the run's end cuts, and a chunk that begins inside an
        epoch.

        Args:
            auto_steps: the desired number of steps of an automatic chunk; see `holdfast.ledger.interval`.
            marks: numbers of steps. An automatic chunk also ends at every multiple of each mark.
        """
        if self.steps == "auto":
            at_once = max(1, round(auto_steps / steps_per_epoch))
            every = [mark for mark in ((self.epochs or 0) * steps_per_epoch, *marks) if mark]
            ends = [(start // steps_per_epoch + at_once) * steps_per_epoch, total_steps]
            left = min([*ends, *((start // mark + 1) * mark for mark in every)]) - start
            return start + math.ceil(left / max(1, round(left / auto_steps)))
        if self.steps is not None:
            epoch_end = (start // steps_per_epoch + 1) * steps_per_epoch
            return min(start + self.steps, epoch_end, total_steps)
        length = (self.epochs or 1) * steps_per_epoch
        return min((start // length + 1) * length, total_steps)


class Checkpoint(Section):
    """The files of checkpoints. The division of a state into files changes its content id, but none of its values."""

    part_bytes: Count = Field(default=PART_BYTES, ge=4096)
    """Maximum size of the tensors in one file of a checkpoint, in bytes."""
    read_back_every: Count = Field(default=10, ge=0)
    """Verify the stored bytes of an attempt's first commit and of every n-th commit after it; 0 verifies none."""


class NearTier(Section):
    """Copies of checkpoints in a folder on the node, for restarts on the same node; see holdfast docs storage."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder on the node's own disk, or in its memory, that stays when ranks and attempts end, such as
    /local/nvme/holdfast. Each save is written to this folder first, and then to the store. Holdfast creates the folder,
    but not its parents. If unset, Holdfast keeps no copies.
    """
    most_bytes: Count = Field(default=NEAR_BYTES, ge=1)
    """Maximum size of the folder in bytes, for all runs together. Holdfast deletes the oldest copies to make room."""


class KeepBest(Section):
    """Keep the checkpoints with the best values of one metric."""

    metric: str = Field(min_length=1)
    """Name of the metric: avg_loss, or a name that evaluate returns. A recipe sets evaluate; your own loop passes it to
    run.observe.
    """
    count: Count = Field(default=1, ge=1)
    """Number of the best checkpoints to keep."""
    mode: Literal["min", "max"] = "min"
    """min: the lowest value is the best. max: the highest is."""


class Retention(Section):
    """Which checkpoints to keep. Always kept: the newest, the newest verified, the newest certified, each pinned."""

    keep_last: Count = Field(default=3, ge=1)
    """Keep this many of the newest checkpoints."""
    keep_every: Count = Field(default=0, ge=0)
    """Also keep the checkpoint at the end of every n-th epoch; 0 keeps none."""
    keep_every_steps: Count = Field(default=0, ge=0)
    """Also keep the checkpoint after every n-th step; 0 keeps none."""
    keep_best: KeepBest | None = None
    """Also keep the best checkpoints by a metric."""


class Determinism(Section):
    """Settings that bit-exactness depends on; see holdfast docs RESUME."""

    mode: Literal["strict", "fast"] = "strict"
    """strict: equal steps compute equal bits. fast: torch's defaults apply, and bits may differ."""
    threads: Processes = Field(default=1, ge=1)
    """Number of torch's intra-op threads in a rank. With a different number, torch adds in a different order."""


def require_port(address: str) -> str:
    """Return an address unchanged if it has a host and a port; otherwise raise ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError("expected host:port, such as node0.example:29500")
    return address


class Mesh(Section):
    """The arrangement of the ranks with compute.parallel = "fsdp". The product of the three numbers is the number of
    ranks on all nodes.
    """

    replicate: Annotated[Processes, Field(ge=1)] = 1
    """Number of groups of ranks that each have the whole model (HSDP). Gradients are averaged over them."""
    shard: Annotated[Processes, Field(ge=1)] = 1
    """Number of ranks over which fully_shard shards the model. With tensor parallelism, fully_shard shards each piece
    of the model over this many ranks.
    """
    tensor: Annotated[Processes, Field(ge=1)] = 1
    """Number of ranks that train the same samples, each with a piece of every layer (tensor parallelism). The recipe's
    parallelize divides the layers.
    """

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.replicate * self.shard * self.tensor

    def resize(self, ranks: int) -> "Mesh":
        """Return a mesh for a different number of ranks, with the same tensor dimension, and if possible the same
        replicas.

        Raises:
            ConfigError: the tensor dimension doesn't divide the number of ranks.
        """
        data, rest = divmod(ranks, self.tensor)
        if rest or not data:
            raise ConfigError(
                f"compute.ranks = {ranks}: compute.mesh.tensor = {self.tensor} doesn't divide it",
                hint=f"set a multiple of {self.tensor}: each group of {self.tensor} ranks trains the same samples",
            )
        replicate = self.replicate if data % self.replicate == 0 else 1
        return Mesh(replicate=replicate, shard=data // replicate, tensor=self.tensor)


class Compute(Section):
    """The device, the number and the precision of the ranks."""

    device: Annotated[Literal["auto", "cpu", "cuda"], OPERATIONAL] = "auto"
    """Device to train on. auto selects a GPU if the machine has one. A machine whose GPUs torch can't use is refused,
    unless compute.gpu_health = "warn".
    """
    ranks: Annotated[
        Literal["all"] | Annotated[Processes, Field(ge=1)], expected('a number from 1 to 1024, or "all"'), IDENTITY
    ] = 1
    """Number of training processes on each machine. "all" is the number of visible GPUs, or 1 if there is no GPU."""
    virtual_ranks: Annotated[Processes, IDENTITY] = Field(default=0, ge=0)
    """Number of shares into which each batch is divided. Each share has its own random numbers, and the
    shares' gradients are summed in a fixed order. So any number of ranks up to this number trains the same bytes. With
    0, batches are not divided, and a different number of ranks trains different bytes.
    """
    nodes: Annotated[Annotated[int, Field(ge=1, le=1024)] | str, OPERATIONAL] = 1
    """Number of machines that train the run together. "1:4" uses as many machines as connect, from 1 to 4. "slurm" is
    the Slurm job's number of nodes; only a configuration file and --set accept it. Start the same command on each
    machine, or let a cluster's launcher start the ranks; see holdfast docs nodes and holdfast docs slurm.
    """
    launcher: Annotated[str, OPERATIONAL] = "torchrun"
    """Launcher of the ranks. torchrun: you start the same command on each machine; several machines need a rendezvous.
    attached: another launcher has started the ranks; holdfast.attach sets this value, you don't; see holdfast docs
    launchers. Every other launcher is that of an extension, such as ray: you start one command, which places the ranks
    on the nodes of a Ray cluster; see holdfast docs nodes.
    """
    rendezvous: Annotated[str | None, OPERATIONAL] = None
    """host:port at which several nodes connect: an address of node 0, and a free port of node 0."""
    wait_s: Annotated[Seconds, OPERATIONAL] = Field(default=600.0, ge=1)
    """Seconds to wait for the other nodes, or for free nodes of a cluster, each time that the ranks start."""
    lost_after_s: Annotated[Seconds, OPERATIONAL] = Field(default=60.0, ge=5)
    """Seconds without a heartbeat after which another node counts as lost."""
    parallel: Annotated[Literal["ddp", "fsdp"], IDENTITY] = "ddp"
    """Parallelism of a recipe's model, or of the model that your own loop passes to run.wrap. ddp: each rank has the
    whole model and optimizer. fsdp: each rank has a shard of both, by torch's fully_shard; checkpoints are written and
    read in shards, too. With virtual ranks both values train the same bits.
    """
    mesh: Annotated[Mesh | None, IDENTITY] = None
    """Arrangement of the ranks with parallel = "fsdp", such as {replicate = 2, shard = 4, tensor = 2}. Unset: each rank
    holds a shard of the whole model. With virtual ranks only its tensor dimension changes bits.
    """
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], IDENTITY] = "no"
    """Precision of accelerate's autocast. fp16 needs a GPU and adds a gradient scaler."""
    loader_workers: Annotated[Processes, OPERATIONAL] = Field(default=0, ge=0)
    """Number of processes that load data for each rank; with 0 the rank itself loads the data. The number never changes
    the trained bytes.
    """
    gpu_health: Annotated[Literal["refuse", "warn"], OPERATIONAL] = "refuse"
    """Reaction to a fault of a device, which nvidia-smi reports or the self-test finds: refuse to train on the device,
    or warn.
    """

    @field_validator("nodes", mode="wrap")
    @classmethod
    def _is_a_number_or_a_range(cls, nodes: object, validate: ValidatorFunctionWrapHandler) -> object:
        least, colon, most = str(nodes).partition(":")
        is_range = colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) < int(most) <= 1024
        try:
            if is_range or not isinstance(nodes, str):
                return validate(nodes)
        except ValidationError:  # raise one line, instead of one line for each type
            pass
        raise ValueError('expected a number from 1 to 1024, a range such as "1:4", or, in a Slurm job, "slurm"')

    @field_validator("rendezvous")
    @classmethod
    def _is_host_and_port(cls, address: str | None) -> str | None:
        return address and require_port(address)

    @model_validator(mode="after")
    def _has_what_nodes_need(self) -> Self:
        if self.has_rendezvous and self.rendezvous is None:
            raise ValueError(f"nodes = {self.nodes!r} needs a rendezvous, such as node0.example:29500")
        if isinstance(self.nodes, str) and not self.is_rank_invariant:
            raise ValueError(f'nodes = "{self.nodes}" changes the number of ranks, which needs virtual_ranks')
        return self

    @model_validator(mode="after")
    def _has_what_a_mesh_needs(self) -> Self:
        if self.mesh is None:
            return self
        if self.parallel != "fsdp":
            raise ValueError(f'mesh needs parallel = "fsdp", found parallel = "{self.parallel}"')
        ranks = "all" if self.ranks == "all" else self.ranks * self.node_range[0]
        if ranks not in ("all", self.mesh.size):
            raise ValueError(f"mesh has {self.mesh.size} ranks, but the run has {ranks}")
        return self

    @model_validator(mode="after")
    def _has_what_a_cluster_needs(self) -> Self:
        if self.has_cluster and self.ranks == "all":
            raise ValueError(
                f'launcher = "{self.launcher}" needs ranks = a number for each node: "all" would count this machine\'s '
                "GPUs"
            )
        if self.has_cluster and self.rendezvous is not None:
            raise ValueError(f'launcher = "{self.launcher}" chooses the rendezvous itself: leave rendezvous out')
        return self

    @property
    def has_cluster(self) -> bool:
        """Return whether an extension's launcher starts the ranks on a cluster, and this command starts none itself."""
        return self.launcher not in ("torchrun", "attached")

    @property
    def is_attached(self) -> bool:
        """Return whether another launcher has started the ranks, so that Holdfast can't start new ranks."""
        return self.launcher == "attached"

    @property
    def has_nodes(self) -> bool:
        """Return whether the run may have several nodes, on each of which a command or a launcher starts the ranks."""
        return self.nodes != 1 and not self.has_cluster

    @property
    def has_rendezvous(self) -> bool:
        """Return whether the nodes find each other through torchrun, which the command on each node starts."""
        return self.has_nodes and not self.is_attached

    @property
    def has_several(self) -> bool:
        """Return whether a process starts this machine's ranks, because there are several ranks or several nodes."""
        return (self.rank_count > 1 or self.has_nodes) and self.launcher == "torchrun"

    @property
    def node_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes."""
        least, _, most = str(self.nodes).partition(":")
        return int(least), int(most or least)

    @property
    def is_rank_invariant(self) -> bool:
        """Return whether any number of data-parallel ranks trains the same bytes."""
        return self.virtual_ranks > 0

    @property
    def invariance(self) -> str:
        """Return the setting that decides `is_rank_invariant`, with its value, for messages."""
        return f"compute.virtual_ranks = {self.virtual_ranks}"

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that change the mathematics. The number of ranks is that of all nodes together."""
        identity = self.model_dump(include={"virtual_ranks" if self.virtual_ranks else "ranks", "mixed_precision"})
        if isinstance(identity.get("ranks"), int):
            identity["ranks"] *= self.node_range[0]
        if self.is_rank_invariant:  # sharded or not
            return identity | ({"mesh": {"tensor": self.tensor_ranks}} if self.tensor_ranks > 1 else {})
        if self.parallel == "ddp":
            return identity
        mesh = {"mesh": self.mesh.model_dump()} if self.mesh else {}
        return identity | {"parallel": self.parallel} | mesh

    def changed(self, **update: Any) -> Self:
        """Return a copy with other ranks or nodes. If `is_rank_invariant`, resize the mesh's data-parallel dimensions.

        Raises:
            ConfigError: the mesh's tensor dimension doesn't divide the number of ranks; or the bytes depend on the
                number of ranks, and the mesh has a different number.
        """
        found = self.model_copy(update=update)
        if found.mesh is None or found.ranks == "all":
            return found
        least, most = found.node_range
        ranks = found.ranks * least
        if found.is_rank_invariant:
            return found.model_copy(update={"mesh": found.mesh.resize(ranks)})
        if least == most and ranks != found.mesh.size:
            raise ConfigError(
                f"compute.ranks = {found.ranks}: compute.mesh has {found.mesh.size} ranks, but the run has {ranks}",
                hint=f"start {found.mesh.size} ranks, or set a mesh of {ranks}; with compute.virtual_ranks the mesh "
                "follows the number of ranks",
            )
        return found

    def limit_ranks(self, count: int) -> int:
        """Return the largest number of ranks, at most ``count``, that can train the run on one machine."""
        if not self.is_rank_invariant:
            return count
        return max(1, min(count // self.tensor_ranks, self.virtual_ranks)) * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        """Return the number of ranks that train the same samples: the mesh's tensor dimension."""
        return self.mesh.tensor if self.mesh else 1

    @property
    def rank_count(self) -> int:
        """Return the number of ranks of a node, after `holdfast.machine.gpus.settle_ranks` has replaced "all"."""
        assert self.ranks != "all", "the number of ranks is not settled yet"
        return self.ranks

    @property
    def gathered_ranks(self) -> int:
        """Return the number of ranks with which one machine trains the same bytes as all nodes together."""
        return self.rank_count * (1 if self.is_rank_invariant else self.node_range[0])


class Resume(Section):
    """Stopping and continuing a run: times, notices, checks and permissions."""

    trusted_keys: tuple[str, ...] = ()
    """Public keys: PEM files, or env:NAME. A run refuses every commit that none of these keys has signed."""
    stop_within_s: Seconds = Field(default=25.0, gt=0)
    """Seconds in which a run saves and commits after SIGTERM or Ctrl-C."""
    drain_file: str | None = Field(default=None, min_length=1)
    """Path of a file that you create to drain this machine: the run then saves and ends. The file may contain the
    number of seconds until the machine goes away; an empty file means 0. Holdfast finds preemption notices of AWS,
    Google Cloud and Azure without a setting.
    """
    accept_drift: tuple[str, ...] = ()
    """Allowed changes since the last commit, by name: a setting, sources.MODULE, files.PATH or built.NAME. The
    attempt's record lists the changes that this setting has allowed.
    """
    environment: Literal["record", "refuse"] = "record"
    """Reaction to a machine on which equal bits are not promised: record the difference and continue, or refuse."""
    tolerance: float = Field(default=1e-3, ge=0)
    """Largest allowed difference between the probe of the resumed model and the saved probe, relative to the probe's
    largest number. This limit applies only on a machine where equal bits are not promised.
    """
    training_probe: bool = True
    """Compare also the gradient of one micro-batch in training mode at the gate. The gradient is computed at
    each save and before the first resumed step, which takes the time of one micro-batch in each chunk.
    """


class ProofSettings(Section):
    """Rehearsals: new ranks start from a checkpoint, and must train the next steps exactly as the running ranks did."""

    rehearse: Literal["on", "first", "off", "record"] | None = None
    """When to rehearse. on: once from inside a chunk, once across an epoch's end and once from a commit, and then
    as often as proof.share allows. first: only these three times. off: never. record: like on, but a run that would not
    continue exactly trains on, and each later commit records the difference. Unset: like on, except in a run that will
    end within a minute.
    """
    share: float = Field(default=0.005, ge=0, le=1)
    """Maximum fraction of the training time for rehearsals after the first three; 1 rehearses in every chunk."""
    beside: bool = True
    """Let the living ranks wait while new ranks rehearse, and then continue the run; this needs CPUs and enough
    memory. Otherwise the living ranks end first, and the new ranks continue the run.
    """


class Supervision(Section):
    """Limits on lost machines and failed attempts, after which Holdfast starts no new attempt on a work pool."""

    max_preemptions: Count | None = Field(default=None, ge=0)
    """Number of machines that a run may lose; it stops when it loses one more. Unset: no limit."""
    max_failures: Count = Field(default=3, ge=1)
    """Number of failed attempts in a row, without a committed step between them, after which the run stops."""


class InitFrom(Section):
    """The checkpoint of a different run, with whose weights the new run begins."""

    run: str = Field(min_length=1)
    """Run with whose weights this run begins: its name on the same store, or STORE/RUN. Or a folder with a model's
    weights, such as a Hugging Face model: model.safetensors, or an index and its files.
    """
    commit: Count | None = Field(default=None, ge=1)
    """Number of the commit to load; unset: the newest."""
    load_optimizer: bool = False
    """Also load the optimizer's moments."""
    reset: tuple[str, ...] = ()
    """Modules or weights that keep the values that the recipe builds."""
    extras: tuple[str, ...] = ()
    """Names of the recipe's extras to load from the checkpoint, too."""
    anneal_offset: Count | None = Field(default=None, ge=0)
    """Number of steps that the recipe's anneals count as completed at the start; unset: the steps of the checkpoint."""


class Log(Section):
    """Logs, metrics and reports of a run."""

    every: Count = Field(default=10, ge=1)
    """Number of steps between two progress lines."""
    folder: str = "logs"
    """Folder for the ranks' own output. Each attempt has one file."""
    sinks: tuple[Literal["tensorboard", "wandb"] | Annotated[str, Field(pattern=CLASS)], ...] = ()
    """Programs to which Holdfast sends the metrics of each commit: tensorboard, wandb, or custom sinks as
    module:Class. holdfast docs metrics shows classes for MLflow and Trackio.
    """
    observers: tuple[Annotated[str, Field(pattern=CLASS)], ...] = ()
    """Custom observers as module:Class, which Holdfast calls at each commit."""
    metrics: str | None = None
    """Export of numbers for a dashboard: prometheus:PORT serves them to Prometheus, otlp:URL sends them to an
    OpenTelemetry collector.
    """
    peak_flops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Peak of one rank's device in FLOP/s, for the model FLOPs utilization (MFU) of a recipe with flops_per_sample."""
    project: str = Field(default="holdfast", pattern=NAME)
    """Name of the project in which the sinks show the run."""
    report_every_s: Seconds = Field(default=60.0, ge=0)
    """Minimum seconds between two updates of report.html in the run's folder, each after a commit. The end of every
    attempt updates the report, too. 0 writes no report.
    """

    @field_validator("metrics")
    @classmethod
    def _is_target(cls, metrics: str | None) -> str | None:
        if metrics is not None:
            read_metrics_target(metrics)
        return metrics

    @field_validator("sinks")
    @classmethod
    def _are_distinct(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(sinks)) < len(sinks):
            raise ValueError("log.sinks names a sink twice")
        return sinks


class RunConfig(Section):
    """One training run: what to train, how long, and where to store it."""

    recipe: Annotated[str, IDENTITY] = Field(pattern=FUNCTION)
    """Function that builds or trains the model, as module:function or file.py:function."""
    run: Annotated[str, OPERATIONAL] = Field(pattern=NAME)
    """Name of the run, and of its folder on the store."""
    store: Annotated[str, OPERATIONAL] = Field(default=DEFAULT_STORE, min_length=1)
    """Folder that contains the runs: a path, or a URL that begins with s3://, gs:// or az://."""
    epochs: Annotated[Count, SCHEDULE] = Field(default=1, ge=1)
    """Total number of epochs. Raise it later to train further."""
    seed: Annotated[int, IDENTITY] = Field(default=DEFAULT_SEED, ge=0, lt=2**63)
    """Seed of Python's, NumPy's and torch's generators; 0 means 1234."""
    skip: Annotated[str, IDENTITY] = ""
    """Steps to skip: their batches are read, but not trained. For example "1200-1210,1300"; the first step of a run
    is 1. For steps that a run has trained already, use holdfast skip, which takes the run back to before these steps.
    """
    where: Annotated[str, OPERATIONAL] = Field(default="here", pattern=POOL)
    """The place to train: "here" for the command's own process, or the name of a Prefect work pool."""
    chunk: Annotated[ChunkLength, OPERATIONAL] = ChunkLength()
    retention: Annotated[Retention, OPERATIONAL] = Retention()
    determinism: Annotated[Determinism, IDENTITY] = Determinism()
    compute: Compute = Compute()
    resume: Annotated[Resume, OPERATIONAL] = Resume()
    checkpoint: Annotated[Checkpoint, OPERATIONAL] = Checkpoint()
    near: Annotated[NearTier, OPERATIONAL] = NearTier()
    proof: Annotated[ProofSettings, OPERATIONAL] = ProofSettings()
    supervision: Annotated[Supervision, OPERATIONAL] = Supervision()
    init_from: Annotated[InitFrom | None, IDENTITY] = None
    log: Annotated[Log, OPERATIONAL] = Log()
    signing_key: Annotated[str | None, OPERATIONAL] = None
    """Private key that signs each commit: a PEM file, or env:NAME. It is never stored in the run."""
    settings: Annotated[dict[str, Any], IDENTITY] = Field(default_factory=dict)
    """Arguments of the recipe's function, by name."""
    extensions: Annotated[dict[str, dict[str, Any]], OPERATIONAL] = Field(default_factory=dict)
    """Settings of installed extensions. Each extension has a table of its own, [extensions.NAME]."""

    @model_validator(mode="before")
    @classmethod
    def _read_earlier(cls, fields: object) -> object:
        return read_earlier(fields)[0] if isinstance(fields, Mapping) else fields

    @field_validator("recipe", mode="before")
    @classmethod
    def _is_importable(cls, recipe: object) -> object:
        check_importable(recipe)
        return recipe

    @field_validator("chunk", mode="before")
    @classmethod
    def _read_chunk(cls, chunk: object) -> object:
        if chunk == "auto":
            return ChunkLength(steps="auto")
        if not isinstance(chunk, Mapping | ChunkLength):
            raise ValueError('expected "auto", or a table with steps or epochs')
        return chunk

    @field_validator("seed", mode="before")
    @classmethod
    def _default_seed(cls, seed: object) -> object:
        return DEFAULT_SEED if seed in (None, 0) else seed

    @field_validator("skip", mode="before")
    @classmethod
    def _read_steps(cls, skip: object) -> object:
        if isinstance(skip, bool) or not isinstance(skip, str | int):
            raise ValueError(EXPECTED)
        return str(Steps.parse(str(skip)))

    @field_validator("run")
    @classmethod
    def _is_no_unfinished_write(cls, run: str) -> str:
        if TEMP_MARK in run:
            raise ValueError(f"a name with {TEMP_MARK} marks an unfinished write, which no listing shows")
        return run

    @field_validator("store")
    @classmethod
    def _is_fit_for_a_run(cls, store: str) -> str:
        if store.startswith("memory:"):
            raise ValueError(
                "ranks are separate processes and can't share a store in memory; give a folder or a bucket"
            )
        if holds_credentials(store):
            raise ValueError(CREDENTIALS_REFUSED)
        return store

    def next_stop(self, start: int, steps_per_epoch: int, auto_steps: int) -> int:
        """Return the last step of the chunk that begins after step ``start``; see `ChunkLength.next_stop`."""
        keep = self.retention
        # An automatic chunk must end where retention keeps a checkpoint.
        marks = (keep.keep_every * steps_per_epoch, keep.keep_every_steps)
        return self.chunk.next_stop(start, steps_per_epoch, self.epochs * steps_per_epoch, auto_steps, marks)

    def with_skip(self, skip: str) -> Self:
        """Return a copy of this configuration with further steps to skip."""
        return self.model_copy(update={"skip": str(Steps.parse(self.skip) | Steps.parse(skip))}) if skip else self

    def with_ranks(self, ranks: int) -> Self:
        """Return a copy of this configuration with this number of ranks."""
        return self.model_copy(update={"compute": self.compute.changed(ranks=ranks)})

    def placed(self, nodes: int, rendezvous: str) -> Self:
        """Return a copy of this configuration for ranks that torchrun starts on this number of nodes."""
        compute = self.compute.changed(nodes=nodes, rendezvous=rendezvous, launcher="torchrun")
        return self.model_copy(update={"compute": compute})

    def attached(self, nodes: int, ranks: int) -> Self:
        """Return a copy of this configuration for ranks that another launcher has started: ``ranks`` on each node."""
        compute = self.compute.changed(nodes=nodes, ranks=ranks, rendezvous=None, launcher="attached")
        return self.model_copy(update={"compute": compute})

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that change the mathematics. Others may change between two attempts of a run."""
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "determinism": self.determinism.model_dump(),
            "compute": self.compute.identity,
            "settings": self.settings,
            **({"init_from": self.init_from.model_dump()} if self.init_from else {}),
            **({"skip": self.skip} if self.skip else {}),
        }


def list_classes(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldClass]]:
    """Yield pairs of dotted name and class, for each field and table that has a class.

    Args:
        prefix: the name of the table, with a dot at its end.
    """
    for name, field in section.model_fields.items():
        classes = [each.of for each in field.metadata if isinstance(each, Classed)]
        if classes:
            yield prefix + name, classes[0]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from list_classes(field.annotation, f"{prefix}{name}.")
