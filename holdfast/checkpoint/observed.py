"""The observations of one step: the losses of its samples, the sizes of its updates, and activations out of range."""

from pydantic import BaseModel, ConfigDict


class SampleLoss(BaseModel):
    """The loss of a single sample, with the parameters before the observed step and the model in evaluation mode.

    Attributes:
        step: the step that trained the sample: the observed step, or the step before it.
        rank: the rank that trained the sample.
        index: the sample's index in a map-style dataset; for a stream, its position in the rank's micro-batches of the
            step.
        content: a digest of the sample's values.
        loss: may be NaN or infinite.
        grad_norm: the norm of the loss's gradient; None if it was not computed.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    rank: int
    index: int
    content: str
    loss: float
    grad_norm: float | None = None


class Update(BaseModel):
    """The change of one parameter by a step.

    Attributes:
        step: the step that changed the parameter: the observed step, or the step before it.
        size: the norm of the change, divided by the parameter's norm before the step; infinite for a parameter of
            zeros.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    name: str
    size: float


class Activation(BaseModel):
    """A layer whose output left its range in the observed step.

    Attributes:
        layer: the layer's name in the model.
        rank: the rank on which the output was seen.
        largest: the largest absolute value of the output; infinite if a value was NaN.
        before: the largest absolute value in earlier steps.
    """

    model_config = ConfigDict(frozen=True)

    layer: str
    rank: int
    largest: float
    before: float
