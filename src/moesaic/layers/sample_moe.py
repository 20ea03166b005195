"""``SampleMoE``: routes every sample of a batch to its top-k experts, which may be whole networks.

Chen et al. 2022, Section 3.2: F(x) = Σ_{m ∈ T_x} π_m(x) f_m(x), where T_x are the experts with the largest noisy scores
and π is the softmax of the scores. The released code's gate is ``gate="raw"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.experts import ConvExperts
from moesaic.layers.expert_graphs import ExpertGraphs
from moesaic.layers.padded_expert_cache import PaddedExperts
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import requested_backend, run_each
from moesaic.ops.eager_conditions import is_plain_eager
from moesaic.ops.global_batch import GlobalBatch, grad_sync_expected, with_zero_gradients
from moesaic.ops.padded_samples import run_padded
from moesaic.ops.per_sample_functions import NotPerSampleError
from moesaic.routing.router import Noise, sample_noise, stable_topk
from moesaic.routing_record import Routing
from moesaic.tensor_checks import check_tensor

__all__ = ["SampleGate", "SampleMoE"]

SampleGate = Literal["softmax", "raw"]


class SampleMoE(RoutedLayer):
    """Routes each sample of a batch (B, …) to its ``top_k`` experts and returns the gated sum of their outputs.

    A sample runs through its own experts only. Experts in a list run once each, on all of their samples together, and
    need one host sync per forward pass, for the number of samples of each. Stacked experts run as grouped GEMMs without
    a host sync.

    An expert without samples does not run: in a list its gradient is ``None``, in a stack it is zero. On several
    ranks it is zero in a list too, because DistributedDataParallel and fully_shard wait for it. BatchNorm in an expert
    of a list sees the samples of that expert only; in training it needs two values per channel, and fails on a
    1×1 map of a single sample.

    Args:
        router: module from samples to scores (B, E), such as ``SampleRouter`` or ``nn.Linear``; scores are converted to
            float32 at least.
        experts: a list or ``nn.ModuleList`` of modules from samples (n, …) to outputs (n, …), all of one shape; or
            stacked experts: ``PatchNetExperts``, ``LinearExperts``, ``MLPExperts``, or a custom module with ``len`` and
            ``forward(samples, routing)``.
        top_k: number of experts per sample; ties go to the lower index.
        noise: router noise, added to the scores before the choice: ``"uniform"``, ``"gaussian"``, ``"gumbel"`` or None;
            see ``TokenChoice``.
        gate: ``"softmax"``: softmax of the scores over all experts, without noise (print); ``"raw"``: the selected
            score itself, with noise (the released code). Both pass gradients to the router.
        noise_scale: factor of the noise.
        noise_in_eval: whether noise is added in eval mode too, as in the released code.
        generator: random number generator of the noise.
        pad: whether samples of experts in a list are padded to few batch sizes; see below. None: on GPUs with
            ``torch.backends.cudnn.benchmark``, where a new batch size costs minutes; True: on every device, and an
            error if an expert cannot run on padded samples; False: never.

    cuDNN selects algorithms for each batch size, and the load of an expert differs from step to step. With ``pad`` the
    samples of an expert are padded with repetitions of the last one to a multiple of a quarter of the mean load. The
    outputs of padding are dropped, and BatchNorm excludes it: outputs, gradients and statistics are those of the
    samples alone. As sizes repeat, training passes of an expert are replayed from CUDA graphs. Samples are not padded
    for experts that draw random numbers, route, have hooks or may mix samples; under ``torch.compile``, export and
    transforms; and in batches that are spread over processes. Code of an expert's own ``forward`` runs when the expert
    is traced, not in every pass.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> experts = [nn.Sequential(nn.Flatten(), nn.Linear(12, 10)) for _ in range(4)]
    >>> layer = moesaic.SampleMoE(moesaic.routing.SampleRouter(3, experts=4, patch_size=2), experts)
    >>> with moesaic.record_routing(layer) as routing:
    ...     y = layer(torch.randn(6, 3, 2, 2))
    >>> y.shape, routing[""].index.shape, int(routing[""].load.sum())
    (torch.Size([6, 10]), torch.Size([6, 1, 1]), 6)
    """

    global_batch: GlobalBatch | None = None
    """The batch of which the samples are a part, in training on several processes."""

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module | Iterable[nn.Module],
        top_k: int = 1,
        noise: Noise | None = "uniform",
        gate: SampleGate = "softmax",
        *,
        noise_scale: float = 1.0,
        noise_in_eval: bool = False,
        generator: torch.Generator | None = None,
        pad: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(router, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"SampleMoE: router={router!r} is a {type(router).__name__}; give a module from samples to scores "
                "(B, E) such as moesaic.routing.SampleRouter"
            )
        self.router = router
        self.experts = _experts(experts)
        self._stacked = not isinstance(self.experts, nn.ModuleList)
        count = len(self.experts)  # pyright: ignore[reportArgumentType]
        check_positive("SampleMoE", experts=count, top_k=top_k)
        if top_k > count:
            raise ValueError(f"SampleMoE: top_k={top_k}, but there are {count} experts; use 1 to {count}")
        self.top_k = top_k
        self.noise: Noise | None = check_choice("SampleMoE", "noise", noise, (*get_args(Noise), None))
        self.gate: SampleGate = check_choice("SampleMoE", "gate", gate, get_args(SampleGate))
        self.noise_scale = noise_scale
        self.noise_in_eval = noise_in_eval
        self.generator = generator
        self.pad: bool | None = check_choice("SampleMoE", "pad", pad, (None, True, False))
        self._padded = PaddedExperts()
        self._count = count

    def forward(self, x: Tensor) -> Tensor:
        routing = self._call_routing_hooks(self.route(x))
        if self._stacked:
            return self.experts(x, routing)
        y, idle = self._run_padded(x, routing) if self._may_pad(x, routing) else self._run_one_by_one(x, routing)
        if not idle or not grad_sync_expected(self) or (self.global_batch is not None and self.global_batch.has_part):
            return y
        assert isinstance(self.experts, nn.ModuleList)
        unused = (parameter for e in sorted(idle) for parameter in self.experts[e].parameters())
        return with_zero_gradients(y, [parameter for parameter in unused if parameter.requires_grad])

    def route(self, x: Tensor) -> Routing:
        """Returns the routing of a batch without running the experts."""
        check_tensor("SampleMoE", x, "samples (B, …)", next(self.router.parameters(), None))
        if not x.ndim:
            raise ValueError(
                "SampleMoE: takes samples (B, …), got a tensor without axes; give it a batch axis: x[None]"
            )
        scores = self.router(x)
        if not isinstance(scores, Tensor) or scores.shape != (x.shape[0], self._count):
            returned = f"{tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise ValueError(
                f"SampleMoE: the router returned {returned} for {x.shape[0]} samples and {self._count} experts; "
                f"it must return scores ({x.shape[0]}, {self._count})"
            )
        return self.choose(scores)

    def choose(self, scores: Tensor) -> Routing:
        """Returns the routing for scores (B, E)."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).unsqueeze(1)
        noisy = self._add_noise(scores)
        index = stable_topk(noisy, self.top_k)
        gate = (scores.softmax(-1) if self.gate == "softmax" else noisy).gather(-1, index)
        return Routing("sample", scores, index, gate, chooser="unit", may_drop=False)

    def _add_noise(self, scores: Tensor) -> Tensor:
        """Returns scores (B, 1, E) with the noise of this mode, if it has any."""
        if self.noise is None or not (self.training or self.noise_in_eval):
            return scores
        return scores + self.noise_scale * sample_noise(self.noise, scores, self.generator, self.global_batch)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, noise={self.noise!r}, gate={self.gate!r}"

    def _may_pad(self, x: Tensor, routing: Routing) -> bool:
        # padded rows take time; cuDNN's benchmarks of each new batch size take far more
        wanted = x.device.type == "cuda" and torch.backends.cudnn.benchmark if self.pad is None else self.pad
        if not wanted:
            return False
        if self.global_batch is not None or x.is_meta or not is_plain_eager(x) or requested_backend() == "reference":
            return False
        return x.is_floating_point() and routing.batch > 0

    def _run_padded(self, x: Tensor, routing: Routing) -> tuple[Tensor, Set[int]]:
        """Runs the experts of a list on padded samples, and returns which did not run."""
        assert isinstance(self.experts, nn.ModuleList)
        found = self._padded.find(self.experts)
        for e, expert in enumerate(found):
            self._check_padded(e, expert)

        def run_expert(e: int, rows: Tensor, count: int) -> Tensor:
            expert = found[e]
            if isinstance(expert, ExpertGraphs):
                try:
                    return self._checked(e, count, lambda: expert.run(rows, count))
                except NotPerSampleError as error:
                    self._padded.refuse(e, error)
                    self._check_padded(e, error)
            return self._run_expert(e, rows[:count])

        padded = [e for e, expert in enumerate(found) if isinstance(expert, ExpertGraphs)]
        y, used = run_padded(x, routing, run_expert, padded)
        return y, set(range(self._count)) - used

    def _check_padded(self, e: int, expert: ExpertGraphs | NotPerSampleError) -> None:
        if self.pad and isinstance(expert, NotPerSampleError):
            raise ValueError(
                f"SampleMoE: pad=True, but in expert {e} {expert}; use pad=None, with which it gets its samples alone"
            )

    def _run_one_by_one(self, x: Tensor, routing: Routing) -> tuple[Tensor, Set[int]]:
        """Runs the experts of a list one after the other, and returns which did not run."""
        idle = set(range(self._count))

        def run_expert(e: int, samples: Tensor) -> Tensor:
            idle.discard(e)
            return self._run_expert(e, samples)

        if self.global_batch is None:
            return run_each(x, routing, run_expert), idle
        # an expert runs on all ranks or on none: its norms exchange statistics, and a gradient is None everywhere
        loads = cast("list[int]", self.global_batch.sum(routing.load).tolist())
        with self.global_batch.subset():
            return run_each(x, routing, run_expert, [e for e, load in enumerate(loads) if load]), idle

    def _run_expert(self, e: int, samples: Tensor) -> Tensor:
        """Runs expert e of a list on its samples."""
        experts = self.experts
        assert isinstance(experts, nn.ModuleList)
        return self._checked(e, samples.shape[0], lambda: experts[e](samples))

    def _checked(self, e: int, n: int, run: Callable[[], Tensor]) -> Tensor:
        """The output of expert e for n samples, checked."""
        try:
            output = run()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"SampleMoE: expert {e} got {n} sample{'s' * (n != 1)} of the batch, too few for its BatchNorm to "
                "train on; use larger batches (and drop a last one that is small), a balance loss, or GroupNorm"
            ) from error
        if not isinstance(output, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"SampleMoE: expert {e} returned a {type(output).__name__}; experts must return one tensor: "
                "wrap it in a module that returns the tensor to combine"
            )
        if output.ndim == 0 or output.shape[0] != n:
            raise ValueError(
                f"SampleMoE: expert {e} returned {tuple(output.shape)} for {n} samples; its output must keep the "
                f"batch axis in front, ({n}, …)"
            )
        if not output.is_floating_point():
            raise TypeError(f"SampleMoE: expert {e} returned {output.dtype}; gates need floating-point outputs")
        return output


def _experts(experts: nn.Module | Iterable[nn.Module]) -> nn.Module:
    """Returns stacked experts unchanged, and a list of modules as ``nn.ModuleList``."""
    if isinstance(experts, ConvExperts):
        raise TypeError(
            "SampleMoE: ConvExperts run on the patches of a map; use moesaic.PatchMoE, or give a list of networks"
        )
    if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
        if isinstance(experts, nn.Sequential) or not hasattr(experts, "__len__"):
            raise TypeError(
                f"SampleMoE: experts is one {type(experts).__name__}; give a list of modules, or stacked experts, "
                "which have a length"
            )
        return experts
    modules = list(experts)
    for e, module in enumerate(modules):
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"SampleMoE: expert {e} is a {type(module).__name__}; experts are modules")
    return experts if isinstance(experts, nn.ModuleList) else nn.ModuleList(modules)
