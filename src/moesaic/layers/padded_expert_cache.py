"""Cache of a layer's experts as they run on padded samples: an entry is valid while the expert does not change."""

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

_MAX_ENTRIES = 2
"""Entries per expert: one for training, one for evaluation."""

_PaddedForm = ExpertGraphs | NotPerSampleError


class PaddedExperts:
    """The experts of a layer as they run on padded samples. A copy of the cache is empty."""

    def __init__(self) -> None:
        self._forms: dict[int, list[tuple[nn.Module, ModuleStates, _PaddedForm]]] = {}
        """Entries by expert, the most recently used first."""
        self._lock = Lock()

    def find(self, experts: nn.ModuleList) -> list[_PaddedForm]:
        """Returns each expert, or the reason why it cannot run on padded samples."""
        if has_hooks(experts):
            return [NotPerSampleError("all modules have hooks")] * len(experts)
        with self._lock:  # inference may run in many threads
            return [self._find(e, expert) for e, expert in enumerate(experts)]

    def refuse(self, e: int, reason: NotPerSampleError) -> None:
        """Stores why an expert cannot run on padded samples, if only a pass has shown it; later passes do not try."""
        with self._lock:
            expert, states, _ = self._forms[e][0]
            self._forms[e][0] = expert, states, reason.with_traceback(None)

    def _find(self, e: int, expert: nn.Module) -> _PaddedForm:
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
        del forms[_MAX_ENTRIES:]
        return form

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedExperts:
        return PaddedExperts()

    def __reduce__(self) -> tuple[type[PaddedExperts], tuple[()]]:
        return PaddedExperts, ()
