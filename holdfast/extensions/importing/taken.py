"""The result of an import, which the ranks send to the attempt."""

from pydantic import BaseModel

from holdfast.journal import Origin


class TakenOver(BaseModel):
    """The result of an import into a training.

    Attributes:
        origin: the record of where the state comes from.
        taken: a line for each component that was imported.
        notes: lines about differences between the source and the run.
    """

    origin: Origin
    taken: list[str]
    notes: list[str]
