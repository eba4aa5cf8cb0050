"""Differential equations, Gaussian processes and probabilistic models of packages on PyPI."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload


class _Slope(nn.Module):
    """The right-hand side of torchdiffeq's demo."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, features))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        slope: Tensor = self.net(y**3)
        return slope


def _neural_ode(odeint: Any, **given: Any) -> Workload:
    torch.manual_seed(0)
    model = _Slope(16)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        pred_y = odeint(model, batch["y0"], batch["t"], **given)
        return torch.mean(torch.abs(pred_y - batch["y"]))

    return Workload(
        model=model,
        batch={"y0": torch.randn(256, 16), "t": torch.linspace(0.0, 1.0, 10), "y": torch.randn(10, 256, 16)},
        loss_fn=loss,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3),
    )


def ode_fixed() -> Workload:
    """Return torchdiffeq's demo with its Runge-Kutta solver of fixed steps."""
    from torchdiffeq import odeint

    return _neural_ode(odeint, method="rk4")


def ode_adaptive() -> Workload:
    """Return torchdiffeq's demo with its default solver, whose number of steps depends on the values."""
    from torchdiffeq import odeint

    return _neural_ode(odeint)


def ode_adjoint() -> Workload:
    """Return torchdiffeq's demo with the adjoint method, which solves the equation backwards in the backward pass."""
    from torchdiffeq import odeint_adjoint

    return _neural_ode(odeint_adjoint, method="dopri5")


def sde() -> Workload:
    """Return torchsde's quick example, trained on the mean of its paths."""
    import torchsde

    class SDE(nn.Module):
        noise_type, sde_type = "general", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.mu = nn.Linear(3, 3)
            self.sigma = nn.Linear(3, 3 * 2)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.mu(y)
            return out

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.sigma(y).view(-1, 3, 2)
            return out

    torch.manual_seed(0)
    model = SDE()
    times = torch.linspace(0, 1, 5)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        paths = torchsde.sdeint(model, batch["y0"], times, dt=0.05)
        return F.mse_loss(paths[-1], batch["target"])

    return Workload(
        model=model,
        batch={"y0": torch.full((2048, 3), 0.1), "target": torch.randn(2048, 3)},
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    )


def liquid() -> Workload:
    """Return ncps' liquid time-constant network wired by its AutoNCP, by its documentation."""
    from ncps.torch import LTC
    from ncps.wirings import AutoNCP

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ltc = LTC(8, AutoNCP(32, 2), batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.ltc(x)[0]
            return out

    torch.manual_seed(0)
    model = Learner()
    return Workload(
        model=model,
        batch={"x": torch.randn(64, 8, 8), "y": torch.randn(64, 8, 2)},
        loss_fn=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        max_grad_norm=1.0,
    )


def exact_gp() -> Workload:
    """Return gpytorch's regression by an exact Gaussian process, by its first tutorial."""
    import gpytorch

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    torch.manual_seed(0)
    x = torch.linspace(0, 1, 500)
    y = torch.sin(x * 6.3) + torch.randn(500) * 0.2
    model = Exact(x, y, gpytorch.likelihoods.GaussianLikelihood()).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        total: Tensor = -mll(model.likelihood, model)(model(batch["x"]), batch["y"])
        return total

    return Workload(
        model=model,
        batch={"x": x, "y": y},
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
    )


def variational_gp() -> Workload:
    """Return gpytorch's stochastic variational Gaussian process on a mini-batch, by its tutorial."""
    import gpytorch
    from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

    class Approximate(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self, inducing: Tensor) -> None:
            distribution = CholeskyVariationalDistribution(inducing.size(0))
            super().__init__(VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    torch.manual_seed(0)
    batch = {"x": torch.randn(1024, 8), "y": torch.randn(1024)}
    both = nn.ModuleDict(
        {"model": Approximate(batch["x"][:200]), "likelihood": gpytorch.likelihoods.GaussianLikelihood()}
    )

    def loss(both: Any, batch: dict[str, Tensor]) -> Tensor:
        mll = gpytorch.mlls.VariationalELBO(both["likelihood"], both["model"], num_data=50000)
        total: Tensor = -mll(both["model"](batch["x"]), batch["y"])
        return total

    return Workload(model=both, batch=batch, loss_fn=loss, optimizer=torch.optim.Adam(both.parameters(), lr=0.01))


def pyro_vae() -> Workload:
    """Return Pyro's variational autoencoder, trained by its ELBO; Pyro validates what it draws."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(784, 256), nn.Softplus(), nn.Linear(256, 100))
            self.decoder = nn.Sequential(nn.Linear(50, 256), nn.Softplus(), nn.Linear(256, 784), nn.Sigmoid())

        def model(self, x: Tensor) -> None:
            pyro.module("decoder", self.decoder)
            with pyro.plate("data", x.shape[0]):
                z = pyro.sample("latent", dist.Normal(x.new_zeros(len(x), 50), x.new_ones(len(x), 50)).to_event(1))
                pyro.sample("obs", dist.Bernoulli(self.decoder(z)).to_event(1), obs=x)

        def guide(self, x: Tensor) -> None:
            pyro.module("encoder", self.encoder)
            with pyro.plate("data", x.shape[0]):
                loc, log_scale = self.encoder(x).chunk(2, dim=1)
                pyro.sample("latent", dist.Normal(loc, log_scale.exp()).to_event(1))

    torch.manual_seed(0)
    pyro.clear_param_store()
    vae = VAE()
    differentiable_loss = Trace_ELBO().differentiable_loss
    return Workload(
        model=vae,
        batch=torch.bernoulli(torch.rand(128, 784)),
        loss_fn=lambda vae, x: differentiable_loss(vae.model, vae.guide, x) / len(x),
        optimizer=torch.optim.Adam(vae.parameters(), lr=1e-3),
    )
