"""A metric of torchmetrics is kept with the numbers that it has collected."""

import pytest
import torch

from holdfast.state import as_stateful, from_payload, to_payload


@pytest.mark.extras("torchmetrics")
def test_metrics_and_their_wrappers_continue_after_a_restore() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def make() -> list[torch.nn.Module]:
        return [
            torchmetrics.MeanMetric(),
            torchmetrics.CatMetric(),
            torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
            torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "sum": torchmetrics.SumMetric()}),
        ]

    for lived, again in zip(make(), make(), strict=True):
        kept, other = as_stateful("metric", lived), as_stateful("metric", again)
        for value in (1.0, 5.0):
            lived.update(torch.tensor(value))  # type: ignore[operator]
            lived.compute()  # type: ignore[operator]
        other.load_state_dict(from_payload(to_payload({"state": kept.state_dict()}))["state"])
        for each in (lived, again):
            each.update(torch.tensor(3.0))  # type: ignore[operator]
        assert str(lived.compute()) == str(again.compute())  # type: ignore[operator]
