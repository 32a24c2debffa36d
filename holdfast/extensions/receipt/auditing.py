"""The audit of a receipt: check it against the store, and train the chunks again that a public seed chooses."""

import math
import random
from collections.abc import Sequence

from pydantic import BaseModel

from holdfast.errors import WrongUse
from holdfast.extensions.receipt.checking import check_receipt, check_weights, describe_untrained
from holdfast.extensions.receipt.signed import Receipt
from holdfast.journal import Commit, Journal
from holdfast.proof.audit import Audit, audit_commit
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.terminal import counted

CHUNKS = 3  # the default number of chunks to train again
SHOWN_FORGED = (1, 2, 5)


class ReceiptAudit(BaseModel):
    """The result of an audit of a receipt.

    Attributes:
        audits: the audits of the chosen commits.
        replayable: the number of commits that can be trained again here, because the checkpoint to start from still
            exists.
        unchecked: the commits that can't be trained again.
        seed: the public seed that chose the commits.
        beginning: the weights that the run began with and hasn't trained itself; empty if there are none.
        weights: the result of the check of the signed files; empty if they are the checkpoint's own, and good.
    """

    run: str
    commit: int
    key_id: str
    commits: int
    audits: list[Audit]
    replayable: int
    unchecked: list[int]
    seed: int
    beginning: str = ""
    weights: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether each of the chosen chunks ended on the same bytes."""
        return all(each.is_identical for each in self.audits)

    def chance(self, forged: int) -> float:
        """Return the probability that an audit with an unpredictable seed chooses none of this many forged chunks."""
        if forged > self.replayable - len(self.audits):
            return 0.0
        return math.comb(self.replayable - forged, len(self.audits)) / math.comb(self.replayable, len(self.audits))

    def _list_notes(self) -> list[str]:
        """Return the changes since the audited commits that have not changed the bytes, such as a different machine."""
        return list(dict.fromkeys(note for each in self.audits if each.is_identical for note in each.notes))

    def __str__(self) -> str:
        lines = [
            f"receipt of commit {self.commit} of run {self.run}, signed by {self.key_id[:16]}: its "
            f"{counted(self.commits, 'commit')} are those of the store",
            *filter(None, (self.beginning, self.weights)),
            *map(str, self.audits),
            f"{len(self.audits)} of {counted(self.replayable, 'chunk')} trained again, chosen by seed {self.seed}: "
            + ("all end on the same bytes" if self.is_good else "NOT all end on the same bytes"),
            *(f"different here: {note}" for note in self._list_notes()),
        ]
        if self.is_good:
            shown = [number for number in SHOWN_FORGED if number <= self.replayable]
            chances = ", ".join(f"{number}: {100 * self.chance(number):.3g} %" for number in shown)
            lines.append(f"the probability that the audit would have passed, by the number of forged chunks: {chances}")
        if self.unchecked:
            numbers = ", ".join(map(str, self.unchecked))
            lines.append(f"not checked, because the checkpoint before was pruned: {numbers}")
        return "\n".join(lines)


def audit_receipt(
    journal: Journal, receipt: Receipt, chunks: int, seed: int, trust: Trust = BY_DEFAULT
) -> ReceiptAudit:
    """Check a receipt against a run's records, and train again those chunks of its chain that a seed chooses.

    Args:
        chunks: the number of chunks to train again; all if the chain has fewer.
        seed: the seed. Choose it after the receipt was made, because a forger who knows the seed can forge the other
            chunks.
        trust: the reader's own configuration, or the parts of the run's records to accept.

    Raises:
        NotTrusted: the receipt contradicts the run's records.
        WrongUse: no chunk can be trained again, or the recipe is not trusted.
        CheckpointDamaged: a checkpoint is damaged.
        RunStopped: a replay ended early.
    """
    commits = check_receipt(journal, receipt)
    weights = check_weights(journal, receipt, commits[-1])
    own = [each for each in commits if not journal.is_given(each)]
    replayable = [each for each in own if not (each.parent and journal.is_pruned(each.parent))]
    if not replayable:
        raise WrongUse(
            f"no commit of run {journal.run!r} can be trained again, because for each commit the checkpoint before it "
            "was pruned",
            hint="retention.keep_every keeps checkpoints for such audits",
        )
    chosen = choose_chunks(replayable, chunks, seed)
    return ReceiptAudit(
        run=journal.run,
        commit=commits[-1].number,
        key_id=receipt.key_id,
        commits=len(commits),
        audits=[audit_commit(journal, each, trust=trust) for each in chosen],
        replayable=len(replayable),
        unchecked=[each.number for each in own if each not in replayable],
        seed=seed,
        beginning=describe_untrained(journal, receipt.chain, commits[0]),
        weights=weights,
    )


def choose_chunks(commits: Sequence[Commit], chunks: int, seed: int) -> list[Commit]:
    """Return the commits that a seed chooses, oldest first; all if there are at most ``chunks``."""
    chosen = random.Random(seed).sample(commits, min(chunks, len(commits)))
    return sorted(chosen, key=lambda each: each.number)
