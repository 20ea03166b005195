"""The first tensor in the output of a network."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from moesaic.models.inspection import first_tensor

LOGITS = torch.ones(2)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        {"loss": None, "logits": LOGITS},
        OrderedDict(states=(), logits=LOGITS),
        ({}, [None, (LOGITS, torch.zeros(3))]),
        SimpleNamespace(logits=LOGITS),
        {"auxiliary": {}, "main": {"out": LOGITS}},
    ],
    ids=str,
)
def test_the_first_tensor_is_found_wherever_it_is(output):
    assert first_tensor(output) is LOGITS


@pytest.mark.parametrize("output", [None, {}, ((), [None]), "logits", SimpleNamespace(loss=LOGITS)], ids=str)
def test_an_output_without_tensor_is_refused(output):
    with pytest.raises(TypeError, match=f"the network returns a {type(output).__name__} without a tensor"):
        first_tensor(output)
