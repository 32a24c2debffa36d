"""What tests of ranks share."""

import pytest

from tests.support.lives import Lives


@pytest.fixture
def fsdp_imported(nursery: Lives) -> None:
    """Spare each rank the import of FSDP2, which takes longer than what most of these tests do."""
    nursery.load("torch.distributed.fsdp")
