"""The experts of a list in the form that runs on padded samples, for as long as their modules stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, cast

from torch import nn

from moesaic.experts.expert_trace import ModuleStates
from moesaic.layers.expert_graphs import ExpertGraphs
from moesaic.layers.padded_expert import PaddedExpert
from moesaic.ops.hook_detection import has_hooks
from moesaic.ops.per_sample_functions import NotPerSampleError

__all__ = ["PaddedExperts"]

_MOST_STATES = 2
"""Forms of an expert that are stored: one for training, one for evaluation."""

_Form = ExpertGraphs | NotPerSampleError


class PaddedExperts:
    """Each expert of a layer in the form that runs on padded samples. Copies of it are empty."""

    def __init__(self) -> None:
        self._forms: dict[int, list[tuple[nn.Module, ModuleStates, _Form]]] = {}
        """The latest first."""
        self._lock = Lock()

    def find(self, experts: nn.ModuleList) -> list[ExpertGraphs | NotPerSampleError]:
        """Returns each expert, or the reason why it cannot run on padded samples."""
        if has_hooks(experts):
            return [NotPerSampleError("all modules have hooks")] * len(experts)
        with self._lock:  # inference may run in many threads
            return [self._find(e, expert) for e, expert in enumerate(experts)]

    def refuse(self, e: int, reason: NotPerSampleError) -> None:
        """Stores a reason that only a pass has shown, so that no other pass is begun in vain."""
        with self._lock:
            expert, states, _ = self._forms[e][0]
            self._forms[e][0] = expert, states, reason.with_traceback(None)

    def _find(self, e: int, expert: nn.Module) -> _Form:
        forms = self._forms.setdefault(e, [])
        for place, (module, states, form) in enumerate(forms):
            if module is expert and not states.changed():
                if place:
                    forms.insert(0, forms.pop(place))
                return form
        states = ModuleStates(cast("Iterable[nn.Module]", expert.modules()))
        try:
            form = ExpertGraphs(PaddedExpert(expert), f"SampleMoE: expert {e}")
        except NotPerSampleError as error:
            form = error.with_traceback(None)
        forms.insert(0, (expert, states, form))
        del forms[_MOST_STATES:]
        return form

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedExperts:
        return PaddedExperts()

    def __reduce__(self) -> tuple[type[PaddedExperts], tuple[()]]:
        return PaddedExperts, ()
