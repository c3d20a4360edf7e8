"""Settings of latent diffusion that come from the pipeline of a pretrained network, unless the config overrides them.

    in use = the config's value if it is given, else the pipeline's, else the default of training from scratch

A value of the config that contradicts the pipeline is refused unless ``override`` names the setting.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from lit_efficient.errors import ConfigurationError, check_choice, refusal
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.named_schedulers import options_from
from lit_efficient.losses.noise_process import TABLES, DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import Distribution, Shift, TimestepSampling
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.pipeline_folder import PipelineMeaning, Scaling, read_meaning
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig, members
from lit_efficient.models.networks.dit import DiTConfig

Setting = Literal["prediction_type", "schedule", "timestep_shift", "empty_prompt", "vae_scaling", "text_encoder"]

_OWNER = "LatentDiffusion"
_UNKNOWN = "that of the data, which is not prepared"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One setting in the table: values as text."""

    name: str
    folder: str  # "-" if the pipeline does not declare the setting
    config: str  # "-" if the config leaves the setting out
    used: str


class PipelineSettings:
    """Settings in use, and where each of them comes from.

    Args:
        backbone: The network.
        override: Settings in which the config may contradict the network's pipeline.
    """

    def __init__(self, backbone: DiTConfig | DiffusersModelConfig, override: Sequence[str]) -> None:
        for name in override:
            check_choice(_OWNER, "override", name, get_args(Setting))
        self.override = tuple(override)
        self.rows: list[Row] = []
        self.meaning: PipelineMeaning | None = None
        if isinstance(backbone, DiffusersModelConfig) and not backbone.draws_weights:
            self.meaning = read_meaning(backbone.place, backbone.subfolder, backbone.revision)
        if self.meaning is not None and self.meaning.scaling is not None:
            self.note("vae_scaling", _scaling_text(*self.meaning.scaling), "-", _UNKNOWN)
        if self.meaning is not None and self.meaning.text is not None:
            self.note("text_encoder", f"pipeline: {self.meaning.text}", "-", _UNKNOWN)

    def prediction(self, given: Prediction | None) -> Prediction:
        """Return the target that the network predicts."""
        declared = None if self.meaning is None else self.meaning.prediction
        return self._choose("prediction_type", "prediction", given, declared, "flow", name="prediction_type")

    def process(self, given: Schedule | DiffusionProcess | dict[str, Any] | None) -> DiffusionProcess:
        """Return the noise process. The name of a schedule leaves its betas to the pipeline; a block gives all."""
        declared = None if self.meaning is None else self.meaning.process
        value = None if given is None else described(DiffusionProcess, "schedule", given, Schedule)
        if declared is None or value is None:
            return self._choose("schedule", "schedule", value, declared, DiffusionProcess(), _process_text)
        if isinstance(given, str) and given == declared.schedule:
            value = declared
        if not _same_process(value, declared):
            self.refuse("schedule", "schedule", _process_text(declared), _process_text(value))
        self.note("schedule", _process_text(declared), _process_text(value), _process_text(value))
        return value

    def timestep_sampling(
        self, given: Distribution | TimestepSampling | dict[str, Any] | None, process: DiffusionProcess
    ) -> TimestepSampling:
        """Return the distribution of training times, with its shift."""
        if given is None:
            given = self._usual_distribution(process)
        value = described(TimestepSampling, "timestep_sampling", given, Distribution)
        shift = self._shift("timestep_sampling.shift", value.shift, process)
        return replace(value, shift=shift)

    def sampler(self, given: str | Sampler | dict[str, Any], process: DiffusionProcess) -> Sampler:
        """Return the sampler, with the shift of its times, the condition of an empty prompt and the class's options."""
        try:
            if isinstance(given, Sampler):
                value = given
            else:
                value = Sampler(**given) if isinstance(given, dict) else Sampler(given)
        except ConfigurationError as error:
            raise ConfigurationError(f"sampler: {error}") from error
        if value.names_class and self.meaning is not None:
            value = replace(
                value, options=options_from(self.meaning.scheduler_fields, value.name) | (value.options or {})
            )
        shift = value.shift
        if value.name == "lcm":  # its times are those of the distillation
            shift = 1.0 if shift is None else shift
        else:
            shift = self._shift("sampler.shift", shift, process)
        empty = value.empty_prompt
        if self.meaning is not None:
            declared = self.meaning.empty_caption
            empty = self._choose("empty_prompt", "sampler.empty_prompt", empty, declared, declared)
        return replace(value, shift=shift, empty_prompt=empty)

    def check_encoders(
        self, found: tuple[Sequence[float], Sequence[float]] | None, encoder: TextEncoder | None
    ) -> None:
        """Compare the latents and the captions of the data with those of the pipeline.

        Args:
            found: Mean and standard deviation of each channel that normalise the data's latents, if they are known.
            encoder: Text encoder of the data, if it has one.

        Raises:
            ConfigurationError: If they differ, and ``override`` does not name the setting.
        """
        if self.meaning is None:
            return
        if self.meaning.scaling is not None and found is not None:
            self._check_scaling(self.meaning.scaling, found)
        if self.meaning.text is not None and encoder is not None:
            self._check_text(TextEncoderConfig(self.meaning.source, pipeline=self.meaning.text), encoder)

    def _check_scaling(self, scaling: Scaling, given: tuple[Sequence[float], Sequence[float]]) -> None:
        declared = _scaling_text(*scaling)
        found = _scaling_text(*given)
        ours = [*given[0], *given[1]]
        theirs = [*scaling[0], *scaling[1]]
        same = len(ours) == len(theirs) and all(
            math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) for one, other in zip(ours, theirs)
        )
        if not same:
            self.refuse("vae_scaling", "the scaling of the data's latents", f"declared, {declared}", found)
        self.note("vae_scaling", declared, "-" if same else found, found)

    def _check_text(self, declared: TextEncoderConfig, encoder: TextEncoder) -> None:
        wanted = [_reading(member) for member in members(declared)]
        found = [_reading(member) for member in members(encoder.spec)]
        if encoder.spec.pipeline is None and len(found) == 1:  # padding "auto" depends on the network
            found[0] = replace(found[0], hides_padding=encoder.hides_padding)
        texts = ["; ".join(map(str, reading)) for reading in (wanted, found)]
        if wanted != found:
            self.refuse(
                "text_encoder", "the data's text_encoder", f"pipeline: {declared.pipeline} ({texts[0]})", texts[1]
            )
        self.note("text_encoder", texts[0], "-" if wanted == found else texts[1], texts[1])

    def lines(self) -> list[str]:
        """Return the table "from the folder / from the config / in use" as lines of text, without a pipeline none."""
        if self.meaning is None:
            return []
        head = Row("setting", "from the folder", "from the config", "in use")
        widths = [max(len(getattr(row, name)) for row in (head, *self.rows)) for name in ("name", "folder", "config")]
        lines = [f"settings of {self.meaning.pipeline or 'the pipeline'} in {self.meaning.source}:"]
        for row in (head, *self.rows):
            cells = [text.ljust(width) for text, width in zip((row.name, row.folder, row.config), widths)]
            lines.append("  " + "  ".join([*cells, row.used]))
        return lines

    def note(self, name: str, folder: str, config: str, used: str) -> None:
        """Add a row to the table, or replace the row of this name."""
        self.rows = [row for row in self.rows if row.name != name]
        self.rows.append(Row(name, folder, config, used))

    def refuse(self, setting: Setting, argument: str, declared: str, value: object) -> None:
        """Raise ConfigurationError for a value that contradicts the pipeline, unless ``override`` names the setting."""
        if setting in self.override:
            return
        assert self.meaning is not None
        allowed = (
            f"{declared}, as {self.meaning.source} declares (to train another one on purpose: override: [{setting}])"
        )
        raise refusal(_OWNER, argument, allowed, value)

    def _usual_distribution(self, process: DiffusionProcess) -> Distribution:
        """Return the distribution with which a pipeline's network was trained; logit_normal from scratch."""
        if self.meaning is not None and process.schedule in TABLES:
            return "uniform"
        if self.meaning is not None and process.schedule == "edm":
            return "log_normal"
        return "logit_normal"

    def _shift(self, argument: str, given: Shift | None, process: DiffusionProcess) -> Shift | None:
        """Return the shift of flow matching. Other schedulers declare none."""
        if self.meaning is None or not self.meaning.process.schedule == process.schedule == "flow":
            return given
        return self._choose("timestep_shift", argument, given, self.meaning.shift, self.meaning.shift)

    def _choose(
        self,
        setting: Setting,
        argument: str,
        given: _T | None,
        declared: _T | None,
        default: _T,
        text: Callable[[_T], str] = str,
        name: str = "",
    ) -> _T:
        """Return the value in use, and add it to the table."""
        used = default
        if declared is not None:
            used = declared
        if given is not None:
            used = given
        if given is not None and declared is not None and given != declared:
            self.refuse(setting, argument, text(declared), given)
        folder = "-" if declared is None else text(declared)
        config = "-" if given is None else text(given)
        self.note(name or argument, folder, config, text(used))
        return used


def described(kind: type[_T], name: str, value: object, names: Any) -> _T:
    """Return an object of class ``kind`` from itself, from a dict of its arguments, or from one of its names.

    Args:
        kind: A dataclass whose first argument is a name.
        name: Name of the argument, for the error.
        value: The value.
        names: Literal type of the allowed names.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        return kind(**value)
    check_choice(_OWNER, name, value, get_args(names))
    return kind(value)  # type: ignore[call-arg]


@dataclass(frozen=True)
class _Reading:
    """Use of a text encoder that decides the embeddings of captions."""

    layer: int
    final_norm: bool
    hides_padding: bool
    lowercase: bool
    instructed: bool

    def __str__(self) -> str:
        names = ("final_norm", "hides_padding", "lowercase", "instructed")
        return ", ".join([f"layer {self.layer}", *(name for name in names if getattr(self, name))])


def _reading(spec: TextEncoderConfig) -> _Reading:
    captions = spec.captions
    hides = captions.padding == "hidden"
    return _Reading(spec.layer, spec.final_norm, hides, captions.lowercase, bool(captions.instruction))


def _scaling_text(mean: Sequence[float], std: Sequence[float]) -> str:
    """Return mean and standard deviation of the channels, short."""
    parts = []
    for name, values in (("mean", mean), ("std", std)):
        shown = [f"{value:.5g}" for value in dict.fromkeys(values)]
        if len(shown) > 2:
            shown = [shown[0], "...", shown[-1]]
        parts.append(f"{name} {' '.join(shown)}")
    return ", ".join(parts)


def _same_process(one: DiffusionProcess, other: DiffusionProcess) -> bool:
    """Return whether two processes mix data and noise in the same amounts."""
    return _amounts(one) == _amounts(other)


def _amounts(process: DiffusionProcess) -> tuple[object, ...]:
    return process.schedule, process.betas_range, process.zero_terminal_snr, process.sigma_data


def _process_text(process: DiffusionProcess) -> str:
    """Return a short description of a noise process."""
    words = [str(process.schedule)]
    if process.schedule in ("linear", "scaled_linear"):
        words.append("betas {:g} to {:g}".format(*process.betas_range))
    if process.zero_terminal_snr:
        words.append("zero_terminal_snr")
    if process.schedule == "edm":
        words.append(f"sigma_data {process.sigma_data:g}")
    return ", ".join(words)
