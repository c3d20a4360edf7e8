"""Feature matching: pull named layers of a network towards those of a frozen teacher that sees the same input.

    loss <- loss + weight * mean over layers of d(head(s_l), t_l),    d = mean(1 - cos) or mean |head(s_l) - t_l|^2

Saves: training steps, where the teacher knows what the student is to learn; none where it does not
Costs: the teacher's forward in each step until `stop_at`, its weights, and a head for each layer while training
Source: Romero et al. (2014), https://arxiv.org/abs/1412.6550; the losses: :mod:`lit_efficient.losses.feature_matching`
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, check_choice, refusal
from lit_efficient.losses.feature_matching import LAYOUTS, LOSSES, match_tokens
from lit_efficient.mechanisms.alignment import PROJECTIONS, Alignment, Call, make_head, mean, unknown_width
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, only_module, width_of
from lit_efficient.traits import Trait


class FeatureMatching(Alignment):
    """Add a loss between layers of a part of the module and layers of a teacher.

    The teacher is called as the student is, with those of its arguments that it knows (labels are left out), after the
    module's own ``training_step``, without gradients. It is put into evaluation mode and frozen, and is no part of the
    module: optimizers, averages and checkpoints never see it. Heads are trained with the module; checkpoints keep them
    beside the weights, exports do not hold them.

    Args:
        student: Name, or pattern for the end of the name, of the submodule whose calls the teacher follows.
        teacher: A module, in code or by ``class_path``; ``data.NAME``, an attribute of the data module; or the folder,
            hub name or ``config.json`` (random weights) of a transformers model, of which the trunk is taken.
        layers: Student's layer -> teacher's layer: patterns for the ends of dotted names within the two, each of one
            module; ``""`` is the output of the whole.
        loss: ``cosine`` or ``l2``.
        weight: Weight of the term, at least 0; 0 measures it and trains as without.
        projection: Head between student and teacher: ``linear``, ``mlp`` (three layers) or ``none`` (equal widths).
        stop_at: Optimizer step from which on neither term nor teacher is computed; ``None``: never.
        layout: How positions lie where the two have different numbers of them: ``grid``, ``sequence``, or ``auto``: a
            grid if one of them is a map. The teacher's are interpolated to the student's.
        widths: Student's layer -> [its width, the teacher's], for layers that do not say how wide they are.
        seed: Seed of the heads' weights.

    Raises:
        ConfigurationError: For an argument out of range, a layer that is not there or says no width, and in the first
            step if the student is not called.
        ConflictError: If the teacher shares parameters with the module, and with manual optimization.
    """

    phase = Phase.FREEZE
    traits = frozenset({Trait.MATCHES_FEATURES, Trait.TRAINING_ONLY})
    heads_name = "feature_matching_heads"
    helps = {"speed": (0, "fewer steps, with a teacher's features to learn from")}

    def __init__(
        self,
        student: str,
        teacher: str | nn.Module,
        layers: dict[str, str],
        loss: str = "cosine",
        weight: float = 1.0,
        projection: str = "linear",
        stop_at: int | None = None,
        layout: str = "auto",
        widths: dict[str, list[int]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("FeatureMatching", "loss", loss, LOSSES)
        check_choice("FeatureMatching", "projection", projection, PROJECTIONS)
        check_choice("FeatureMatching", "layout", layout, LAYOUTS)
        if not student or not layers:
            raise refusal("FeatureMatching", "student and layers", "names", (student, layers))
        for key, pair in (widths or {}).items():
            if key not in layers or len(pair) != 2 or min(pair) < 1:
                raise refusal("FeatureMatching", "widths", "two numbers of at least 1 for a key of layers", {key: pair})
        self.student = student
        self.teacher = teacher
        self.layers = dict(layers)
        self.loss = loss
        self.weight = weight
        self.projection = projection
        self.stop_at = stop_at
        self.layout = layout
        self.widths = widths
        self.seed = seed
        self.check_common()

    def find(self, data: Any) -> Teacher:
        assert self.teacher is not None
        theirs = list(dict.fromkeys(self.layers.values()))
        return find_teacher(self.teacher, theirs, who="FeatureMatching", data=data, argument="layers")

    def listens_to(self, module: nn.Module) -> list[str]:
        """The student, whose arguments the teacher gets, and its layers."""
        student = only_module(module, self.student, "FeatureMatching: student")
        inside = module.get_submodule(student)
        names = [only_module(inside, layer, "FeatureMatching: layers") for layer in self.layers]
        return [student, *(f"{student}.{name}" if name else student for name in names)]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        made = {}
        for i, (key, theirs) in enumerate(self.layers.items()):
            ours, wanted = self._widths_of(module, self.names(module)[i + 1], key, theirs)
            if self.projection == "none" and ours != wanted:
                raise ConfigurationError(
                    f"FeatureMatching: projection='none' needs equal widths, but {key!r} has {ours} and the teacher's "
                    f"{theirs!r} {wanted}; use linear or mlp"
                )
            made[str(i)] = make_head(self.projection, ours, wanted)
        return made

    def term(self, calls: Mapping[str, list[Call]], output: Any, module: nn.Module, batch: Any) -> Tensor:
        student, *names = self.names(module)
        if not calls[student]:
            raise ConfigurationError(
                f"FeatureMatching: training_step never called {student!r} (its forward): name the submodule that it "
                "calls in student"
            )
        assert self._teacher is not None
        teacher = [self._teacher.features(*args, **kwargs) for args, kwargs, _ in calls[student]]
        terms = []
        for i, (name, (key, layer)) in enumerate(zip(names, self.layers.items(), strict=True)):
            if len(calls[name]) != len(teacher):
                if not calls[name] and _may_be_skipped(module, name):
                    continue
                raise ConfigurationError(
                    f"FeatureMatching: {key!r} ran {len(calls[name])} times while {student!r} was called "
                    f"{len(teacher)} times: match a layer that runs once in each call"
                )
            for features, (_, kwargs, _), theirs in zip(
                self.features(calls[name], module, name), calls[student], teacher, strict=True
            ):
                ours, wanted = match_tokens(features, theirs[layer], self.layout)
                ours = self.project(module, str(i), ours, key, wanted)
                terms.append(LOSSES[self.loss](ours, wanted, _mask(kwargs, ours)))
        if not terms:  # all of them were dropped in this step
            return next(p for p in module.parameters() if p.requires_grad).sum() * 0.0
        return mean(terms)

    def _widths_of(self, module: nn.Module, name: str, key: str, layer: str) -> tuple[int, int]:
        if self.widths and key in self.widths:
            ours, theirs = self.widths[key]
            return ours, theirs
        assert self._teacher is not None
        found = width_of(module, name), self._teacher.width(layer)
        for width, what in zip(found, (f"{name!r}", f"the teacher's {layer!r}"), strict=True):
            if width is None:
                remedy = f"give widths={{{key!r}: [student's, teacher's]}}"
                raise unknown_width("FeatureMatching", what, remedy)
        return found  # type: ignore[return-value]


def _mask(kwargs: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """The padding mask [B, N] that a language model was called with."""
    mask = kwargs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.shape == tokens.shape[:2] else None


def _may_be_skipped(module: nn.Module, name: str) -> bool:
    """Whether a block around the layer is dropped at random (StochasticDepth)."""
    parts = name.split(".")
    return any(hasattr(module.get_submodule(".".join(parts[:i])), "_drop_rate") for i in range(len(parts)))
