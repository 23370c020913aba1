"""What the tests of the Python package share."""

import gc

import pytest
import torch
from ranks import end_ranks, group_of_one
from torch.distributed.device_mesh import init_device_mesh

import tandem


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(20240)
    yield
    assert tandem._C.active_recipe() is None, "a test left an autocast region open"
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "a test left a region of torch.autocast open"


@pytest.fixture(scope="module")
def collections_pass_over_older_objects():
    """For files whose tests collect garbage, which takes a second each with what all earlier tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_rank(tmp_path):
    """The mesh of this process, as a group of its own."""
    with group_of_one(tmp_path):
        yield init_device_mesh("cpu", (1,))


@pytest.fixture(autouse=True, scope="session")
def _ranks_end():
    yield
    end_ranks()
