import itertools
import math

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses import diffusion, timesteps
from lit_efficient.losses.noise_process import T_RANGE, DiffusionProcess, alphas_cumprod, karras_time

SCHEDULES = ("flow", "cosine")
PREDICTIONS = ("flow", "eps", "v", "x0", "edm")
PROCESSES = [
    *(DiffusionProcess(name) for name in ("flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm")),
    DiffusionProcess("scaled_linear", zero_terminal_snr=True),
    DiffusionProcess("edm", sigma_data=0.5),
]


def draw(count: int = 7):
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, count, 2, 3, generator=generator, dtype=torch.float64)
    return x0, eps, torch.linspace(0.01, 0.99, count, dtype=torch.float64)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_target_converts_back_to_the_same_data_and_noise(process, prediction):
    x0, eps, t = draw()
    x_t = diffusion.add_noise(x0, eps, t, process)
    wanted = diffusion.target(x0, eps, t, process, prediction)
    got_x0, got_eps = diffusion.to_x0_eps(wanted, x_t, t, process, prediction)
    torch.testing.assert_close(got_x0, x0, rtol=0, atol=1e-6)
    torch.testing.assert_close(got_eps, eps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_one_networks_output_means_the_same_data_as_every_target(process):
    """The output is arbitrary, as a network's is: no target of any x0 and eps that made x_t."""
    x_t, output, t = draw()
    for prediction, wanted in itertools.product(PREDICTIONS, PREDICTIONS):
        x0, eps = diffusion.to_x0_eps(output, x_t, t, process, prediction)
        converted = diffusion.convert(output, x_t, t, process, prediction, wanted)
        x0_too, eps_too = diffusion.to_x0_eps(converted, x_t, t, process, wanted)
        torch.testing.assert_close(x0_too, x0, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(eps_too, eps, rtol=1e-6, atol=1e-6)


def test_edms_preconditioned_denoiser_and_weight_are_the_plain_loss_of_its_target():
    x0, eps, _ = draw()
    for d in (0.5, 1.0):
        process = DiffusionProcess("edm", sigma_data=d)
        sigma = torch.logspace(-2, 1.5, len(x0), dtype=torch.float64)
        t = karras_time(sigma)
        torch.testing.assert_close(process.alpha_sigma(t)[1], sigma)
        x_t = diffusion.add_noise(x0, eps, t, process)
        # Table 1 of the paper, written out
        s = diffusion.per_sample(sigma, x0)
        skip, out = d**2 / (s**2 + d**2), s * d / (s**2 + d**2) ** 0.5
        scale, noise = 1 / (s**2 + d**2) ** 0.5, s.log() / 4
        torch.testing.assert_close(process.input_scale(t), scale.flatten())
        torch.testing.assert_close(process.network_time(t), noise.flatten())
        network = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        denoised = skip * x_t + out * network
        torch.testing.assert_close(diffusion.to_x0_eps(network, x_t, t, process, "edm")[0], denoised)
        weight = (s**2 + d**2) / (s * d) ** 2  # lambda
        wanted = diffusion.target(x0, eps, t, process, "edm")
        torch.testing.assert_close(weight * (denoised - x0) ** 2, (network - wanted) ** 2)
        # Inputs and targets have the variance of the paper's design: 1.
        unit = diffusion.target(torch.tensor([d]), torch.tensor([0.0]), torch.tensor([0.5]), process, "edm") ** 2
        unit += diffusion.target(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.5]), process, "edm") ** 2
        torch.testing.assert_close(unit, torch.ones(1))


def test_edm_of_unit_data_is_minus_v_of_the_variance_preserving_process():
    x0, eps, t = draw()
    edm = diffusion.target(x0, eps, t, "cosine", "edm")
    torch.testing.assert_close(edm, -diffusion.target(x0, eps, t, "cosine", "v"))


NAMES = {"linear": "linear", "scaled_linear": "scaled_linear", "squared_cosine": "squaredcos_cap_v2"}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tables_noise_and_velocity_are_those_of_diffusers(name, zero):
    from diffusers import DDPMScheduler

    process = DiffusionProcess(name, zero_terminal_snr=zero)
    first, last = process.betas_range
    theirs = DDPMScheduler(
        beta_schedule=NAMES[name], beta_start=first, beta_end=last, rescale_betas_zero_snr=zero, clip_sample=False
    )
    torch.testing.assert_close(alphas_cumprod(process).float(), theirs.alphas_cumprod, rtol=0, atol=1e-6)
    index = torch.tensor([0, 1, 17, 500, 997, 998, 999])
    t = (index + 1) / 1000
    x0, eps = (part.float() for part in draw()[:2])
    # Their table is in float32, and near the clean end sqrt(1 - abar) makes much of its last digit.
    error = (alphas_cumprod(process)[index] - theirs.alphas_cumprod[index].double()).abs()
    slack = 2e-6 + 3 * (error / (2 * (1 - theirs.alphas_cumprod[index].double()).sqrt())).max().item()
    assert slack < 3e-4
    torch.testing.assert_close(
        diffusion.add_noise(x0, eps, t, process), theirs.add_noise(x0, eps, index), atol=slack, rtol=0
    )
    velocity = diffusion.target(x0, eps, t, process, "v")
    torch.testing.assert_close(velocity, theirs.get_velocity(x0, eps, index), atol=slack, rtol=0)
    torch.testing.assert_close(process.network_time(t) * 1000, index.float(), atol=1e-3, rtol=0)


def test_zero_terminal_snr_ends_in_pure_noise_and_keeps_the_first_step():
    for name in NAMES:
        plain, zero = DiffusionProcess(name), DiffusionProcess(name, zero_terminal_snr=True)
        assert zero.log_snr(torch.ones(1)) == -math.inf
        assert plain.log_snr(torch.ones(1)) > -math.inf
        torch.testing.assert_close(alphas_cumprod(zero)[0], alphas_cumprod(plain)[0])
    assert DiffusionProcess("scaled_linear").alpha_sigma(torch.ones(1))[0].item() == pytest.approx(0.0683, abs=1e-4)


def test_offset_noise_shifts_whole_channels_and_the_perturbation_is_seen_but_not_asked_for():
    x0, generator = torch.zeros(20_000, 2, 3, 3), torch.Generator().manual_seed(0)
    plain, seen = diffusion.draw_noise(x0, DiffusionProcess(), generator)
    assert seen is plain
    assert plain.mean(dim=(2, 3)).var().item() == pytest.approx(1 / 9, abs=0.01)
    offset, seen = diffusion.draw_noise(x0, DiffusionProcess(offset_noise=0.5), generator)
    assert seen is offset
    assert offset.mean(dim=(2, 3)).var().item() == pytest.approx(1 / 9 + 0.25, abs=0.01)
    assert (offset - offset.mean(dim=(2, 3), keepdim=True)).var().item() == pytest.approx(8 / 9, abs=0.01)
    asked, seen = diffusion.draw_noise(x0, DiffusionProcess(input_perturbation=0.1), generator)
    assert asked.var().item() == pytest.approx(1.0, abs=0.01)
    assert (seen - asked).var().item() == pytest.approx(0.01, abs=1e-3)
    assert torch.corrcoef(torch.stack([(seen - asked).flatten(), asked.flatten()]))[0, 1].abs() < 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "exponential"}, "schedule must be one of flow, cosine, .*, got 'exponential'"),
        ({"schedule": "flow", "beta_start": 0.1}, "beta_start must be unset for schedule 'flow'"),
        ({"schedule": "linear", "beta_start": 0.5}, "beta_start must be above 0 and at most 0.02, got 0.5"),
        ({"schedule": "linear", "beta_end": 1.0}, "beta_end must be below 1, got 1.0"),
        ({"schedule": "flow", "zero_terminal_snr": True}, "False for schedule 'flow', which always ends in pure noise"),
        ({"schedule": "edm", "zero_terminal_snr": True}, "False for schedule 'edm', which has no last step"),
        ({"sigma_data": 0.0}, "sigma_data must be above 0, got 0.0"),
        ({"offset_noise": -0.1}, "offset_noise must be at least 0 and below 1, got -0.1"),
        ({"input_perturbation": 1.0}, "input_perturbation must be at least 0 and below 1, got 1.0"),
    ],
)
def test_a_process_is_checked_when_described(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        DiffusionProcess(**wrong)


def test_schedules_run_from_data_to_noise():
    ends = torch.tensor([0.0, 1.0])
    for schedule in SCHEDULES:
        alpha, sigma = diffusion.alpha_sigma(ends, schedule)
        torch.testing.assert_close(alpha, torch.tensor([1.0, 0.0]))
        torch.testing.assert_close(sigma, torch.tensor([0.0, 1.0]))
    t = torch.rand(100)
    alpha, sigma = diffusion.alpha_sigma(t, "cosine")
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(100))  # variance-preserving
    torch.testing.assert_close(sum(diffusion.alpha_sigma(t, "flow")), torch.ones(100))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_log_snr_is_zero_in_the_middle_falls_and_is_finite_where_training_draws(schedule):
    t = torch.linspace(*T_RANGE, 101)
    values = diffusion.log_snr(t, schedule)
    assert values.isfinite().all()
    assert (values.diff() < 0).all()
    assert values[50].item() == pytest.approx(0.0, abs=1e-5)
    alpha, sigma = diffusion.alpha_sigma(t, schedule)
    torch.testing.assert_close(values.exp(), (alpha / sigma) ** 2, rtol=1e-3, atol=0)


def test_the_flow_target_is_the_velocity_of_the_path():
    x0, eps, t = draw()
    h = 1e-6
    slope = (diffusion.add_noise(x0, eps, t + h, "flow") - diffusion.add_noise(x0, eps, t - h, "flow")) / (2 * h)
    torch.testing.assert_close(diffusion.target(x0, eps, t, "flow", "flow"), slope)


def test_v_is_the_velocity_in_angle_of_the_cosine_path():
    x0, eps, t = draw()
    h = 1e-6
    slope = (diffusion.add_noise(x0, eps, t + h, "cosine") - diffusion.add_noise(x0, eps, t - h, "cosine")) / (2 * h)
    torch.testing.assert_close(diffusion.target(x0, eps, t, "cosine", "v"), slope / (math.pi / 2))


@pytest.mark.parametrize("call", ["target", "to_x0_eps", "alpha_sigma", "sample_timesteps"])
def test_unknown_names_are_refused_with_what_is_allowed(call):
    x0, eps, t = draw()
    arguments = {
        "target": (x0, eps, t, "flow", "epsilon"),
        "to_x0_eps": (x0, eps, t, "flow", "epsilon"),
        "alpha_sigma": (t, "exponential"),
        "sample_timesteps": (3, "lognormal"),
    }[call]
    with pytest.raises(ConfigurationError, match=r"must be one of .*, got '(epsilon|exponential|lognormal)'"):
        getattr(timesteps if call == "sample_timesteps" else diffusion, call)(*arguments)
