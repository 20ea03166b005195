"""The released WRN block, written out densely as the authors run it, equals the sparse layer over training."""

import pytest
import torch
from strategies import BACKENDS
from torch import nn
from torch.nn import functional as F

import moesaic


class ReleasedBlock(nn.Module):
    """Per expert: gate the map (softmax over all patches, top-l kept), BatchNorm, ReLU, conv; concatenate."""

    def __init__(self, C: int, out: int, experts: int, patches: int, p: int, kernel: int) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Conv2d(C, 1, p, stride=p, bias=False) for _ in range(experts))
        self.norms = nn.ModuleList(nn.BatchNorm2d(C) for _ in range(experts))
        self.convs = nn.ModuleList(nn.Conv2d(C, out // experts, kernel, padding=kernel // 2) for _ in range(experts))
        self.patches, self.p = patches, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for router, norm, conv in zip(self.routers, self.norms, self.convs, strict=True):
            score = router(x)
            weight = score.flatten(1).softmax(1)
            top = weight.topk(self.patches, dim=1)
            gate = torch.zeros_like(weight).scatter(1, top.indices, top.values).view_as(score)
            outputs.append(conv(F.relu(norm(x * F.interpolate(gate, scale_factor=self.p)))))
        return torch.cat(outputs, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("p", "kernel", "L"), [(4, 3, 2), (1, 1, 16), (2, 3, 16), (2, 5, 1)])
def test_a_training_step_equals_that_of_the_released_block(backend, p, kernel, L):
    torch.manual_seed(0)
    E, C, out, size = 4, 6, 8, 8
    theirs = ReleasedBlock(C, out, E, L if p < 4 else 2, p, kernel).double()
    ours = moesaic.PatchMoE(
        C,
        out,
        experts=E,
        patches_per_expert=theirs.patches,
        patch_size=p,
        kernel_size=kernel,
        gate="softmax_all",
        gate_on="input",
        expert_norm=True,
        dtype=torch.float64,
    )
    with torch.no_grad():
        ours.router.weight.copy_(torch.cat([r.weight for r in theirs.routers]))
        ours.experts.weight.copy_(torch.stack([c.weight for c in theirs.convs]))
        ours.experts.bias.copy_(torch.stack([c.bias for c in theirs.convs]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (theirs, ours)]

    def losses(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        with moesaic.backend(backend):
            return [F.mse_loss(model(x), target) for model in (theirs, ours)]

    for _ in range(5):
        x = torch.randn(3, C, size, size, dtype=torch.float64) + 1
        loss = losses(x, torch.randn(3, out, size, size, dtype=torch.float64))
        torch.testing.assert_close(loss[1], loss[0], rtol=1e-10, atol=1e-10)
        for optimizer, value in zip(optimizers, loss, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    close = {"rtol": 1e-9, "atol": 1e-10}
    norm = ours.experts.norm
    torch.testing.assert_close(norm.running_mean, torch.stack([n.running_mean for n in theirs.norms]), **close)
    torch.testing.assert_close(norm.running_var, torch.stack([n.running_var for n in theirs.norms]), **close)
    torch.testing.assert_close(norm.weight, torch.stack([n.weight for n in theirs.norms]), **close)
    torch.testing.assert_close(ours.router.weight, torch.cat([r.weight for r in theirs.routers]), **close)
    torch.testing.assert_close(ours.experts.weight, torch.stack([c.weight for c in theirs.convs]), **close)
    theirs.eval()
    ours.eval()
    x = torch.randn(2, C, size, size, dtype=torch.float64)
    with moesaic.backend(backend):
        torch.testing.assert_close(ours(x), theirs(x), **close)
