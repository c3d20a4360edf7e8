"""The scheduler in an exported pipeline draws what the run draws, whatever the process, the target and the sampler."""

from types import SimpleNamespace

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.export.diffusers_parts import EVERY, scheduler_of
from lit_efficient.losses.diffusers_sampling import native_prediction
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import STEPS, DiffusionProcess, karras_time
from lit_efficient.tasks.latent_sampling import sample_latents
from tests.losses.mixture import NOISE, best_predictor, check_counts
from tests.losses.test_diffusion_sampling import PROCESSES, SAMPLERS, refused

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of diffusers


def as_a_pipeline(scheduler, process: DiffusionProcess, prediction, steps: int) -> torch.Tensor:
    """The loop of diffusers' pipelines, around the network that the exported one stands for."""
    predict = best_predictor(process, prediction)
    scheduler.set_timesteps(steps)
    x = NOISE.float() * float(scheduler.init_noise_sigma)
    for timestep in scheduler.timesteps:
        given = scheduler.scale_model_input(x, timestep)
        if process.schedule == "edm":  # the network gets the scaled input, and log(sigma) / 4
            t = karras_time((4 * timestep.double()).exp())
            given = given.double() / process.input_scale(t)
        else:  # of a table it gets the entry, as of cosine, whose network was folded by one
            t = (timestep.double() + (process.schedule != "flow")) / STEPS
        output = predict(given, t.expand(len(x))).float()
        x = scheduler.step(output, timestep, x, return_dict=False)[0]
    return x


@pytest.mark.turns(6)
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_a_pipeline_walks_to_the_mixture_as_the_run_does_or_the_export_is_refused(process: DiffusionProcess) -> None:
    targets = {native_prediction(process), "v", "x0", "eps"}
    for name, prediction in ((name, target) for name in SAMPLERS for target in sorted(targets)):
        of_flow = process.schedule in ("flow", "edm") and prediction != native_prediction(process)
        if refused(process, name, prediction) and not of_flow:
            continue  # such a run does not start
        if of_flow or refused(process, "ddim", prediction):
            with pytest.raises(ConfigurationError, match="no scheduler of diffusers samples from this network"):
                scheduler_of(parts(process, prediction, name), EVERY)
            continue
        drawn = {
            n: as_a_pipeline(scheduler_of(parts(process, prediction, name), EVERY), process, prediction, n)
            for n in (2, 10, 20, 50)
        }
        check_counts(drawn)
        if name == "dpmsolver++" or (name in ("builtin", "ddim") and process.schedule != "flow"):
            ours = sample_latents(best_predictor(process, prediction), NOISE, 10, process, prediction, Sampler(name))
            near = (drawn[10] - ours).abs().max(dim=1).values < 0.02  # flow's times are cut to thousandths there
            assert near.float().mean() > 0.99, (name, prediction)


def parts(process: DiffusionProcess, prediction, name) -> SimpleNamespace:
    return SimpleNamespace(process=process, prediction=prediction, sampler=Sampler(name), steps=10)
