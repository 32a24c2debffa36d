"""The division of a training's state into shards, or into the stages of a pipeline: save, check and read it."""

from typing import Any

from torch import Tensor

from holdfast.checkpoint import Payload
from holdfast.checkpoint.near import NearReader
from holdfast.journal import Commit
from holdfast.store import Store
from holdfast.training.build import Training
from holdfast.training.naming import name_parameters
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.replicas import check_replicas
from holdfast.training.sharded.restoring import read_shards
from holdfast.training.sharded.shards import find_shards, find_unplaced
from holdfast.training.sharded.stage_sums import describe_stages
from holdfast.training.sharded.stages import Wanted, hold_whole, unite
from holdfast.training.tensor_names import list_saved_names


class Division:
    """The division of a training's state over its ranks, which write and read one checkpoint together.

    All ranks call each method but `find_unplaced` together, while no save is in progress.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._ranks = training, training.ranks

    @property
    def peers(self) -> Exchange:
        """Return the ranks that write a checkpoint together."""
        return self._ranks.exchange

    def unite(self, payload: Payload) -> Payload:
        """Return a state as all ranks save it together: with the main rank's plain values, in a pipeline the union.

        Plain values, such as metrics, may differ between ranks. In the file they have to be equal, because the length
        of their text decides where the tensors' bytes begin.

        Raises:
            StateError: the ranks have different values where a checkpoint can keep only one.
        """
        peers = self.peers
        if self._ranks.stages is not None:
            payload = unite(peers, payload)
        else:
            payload = Payload(payload.tensors, peers.decide(lambda: payload.tree))
        check_replicas(peers, payload)
        return payload

    def check_copies(self, common: Payload) -> None:
        """Raise StateError if several ranks hold different values of one tensor, or of one row of a tensor.

        Args:
            common: the components of the state that all ranks have in common; empty if it can't be captured yet.
        """
        if self._ranks.stages is None:
            check_replicas(self.peers, common)
        elif all(self._ranks.gather(bool(common.tree))):
            check_replicas(self.peers, unite(self.peers, common))

    def check_groups(self, common: Payload) -> None:
        """Raise StateError if ranks that train the same samples hold different values of one whole tensor."""
        check_replicas(self.peers, hold_whole(common))

    def find_unplaced(self, common: Payload) -> str:
        """Return the name of a sharded tensor whose sharding a resume couldn't repeat; empty if there is none."""
        return find_unplaced(common, find_shards(self._training.recipe))

    def describe(
        self, members: dict[str, dict[str, Tensor]], values: dict[str, int], *, in_detail: bool
    ) -> dict[str, Any]:
        """Return the checksums of a whole pipeline's stages; see `checksums.describe_components`.

        Args:
            members: this rank's tensors, by component and name.
            values: checksums of the plain values, by component.
        """
        return describe_stages(self._ranks.gather, members, values, in_detail=in_detail)

    def read(self, folder: Store, commit: Commit, near: NearReader | None) -> Payload:
        """Read and verify a committed state, of which each rank keeps its own part; see `read_shards`."""
        training, shards = self._training, find_shards(self._training.recipe)
        training.saver.wait()
        return read_shards(self.peers, shards, folder, commit, training.saver.buffers, near, self._find_wanted())

    def _find_wanted(self) -> Wanted | None:
        """Return the names of the tensors that this rank's stage of a pipeline loads; None without a pipeline."""
        if self._ranks.stages is None:
            return None
        model = self._training.recipe.model
        parameters = frozenset(name_parameters(self._training))
        return Wanted(frozenset({*list_saved_names(model), *model.state_dict()}), parameters)
