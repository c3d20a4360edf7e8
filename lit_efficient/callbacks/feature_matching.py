"""Feature matching: pull named layers of a network towards layers of a frozen teacher that gets the same input.

    loss <- loss + weight * mean over layers of d(head(s_l), t_l),    d = mean(1 - cos) or mean |head(s_l) - t_l|^2

Saves: training steps, if the teacher has learned what the student is trained for; otherwise none
Costs: the teacher's forward in each step until `stop_at`, its weights, and a head for each layer during training
Source: Romero et al. (2014), https://arxiv.org/abs/1412.6550; the losses: :mod:`lit_efficient.losses.feature_matching`
"""

from collections.abc import Mapping

from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, check_choice, refusal
from lit_efficient.losses.feature_matching import LAYOUTS, LOSSES, match_tokens
from lit_efficient.mechanisms.alignment import PROJECTIONS, Alignment, Call, mean
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, only_module, width_of
from lit_efficient.surgery import parents
from lit_efficient.traits import Trait


class FeatureMatching(Alignment):
    """Add a loss between layers of a part of the module and layers of a teacher.

    The teacher is called after the module's ``training_step`` with the arguments of the student that it knows (without
    labels), and without gradients. It is frozen, in evaluation mode, and not a part of the module: optimizers, averages
    and checkpoints do not see it. Heads are trained with the module. Checkpoints keep them apart from the weights, and
    exports leave them out.

    Args:
        student: Submodule whose calls the teacher follows: its name, or a pattern for the end of its name.
        teacher: A module, in code or by ``class_path``; ``data.NAME``, an attribute of the data module; or the folder,
            hub name or ``config.json`` (random weights) of a transformers model, whose trunk is used.
        layers: Student's layer -> teacher's layer. Both are patterns for the ends of dotted names inside the two
            networks, and each must match one module. ``""`` is the output of the whole network.
        loss: ``cosine`` or ``l2``.
        weight: Weight of the term, at least 0. With 0 the term is computed and logged, but not added.
        projection: Head between student and teacher: ``linear``, ``mlp`` (three layers) or ``none`` (equal widths).
        stop_at: Optimizer step from which on neither term nor teacher is computed; ``None`` for never.
        layout: Arrangement of the positions if the two networks have different numbers of them: ``grid``, ``sequence``,
            or ``auto``, which is a grid if one of them gives a map. The teacher's features are interpolated to the
            student's positions.
        widths: Student's layer -> [its width, the teacher's width], for layers whose width cannot be determined.
        seed: Seed of the heads' weights.

    Raises:
        ConfigurationError: For an argument out of range, a layer that does not exist or has no known width, and in the
            first step if the student is not called.
        ConflictError: If the teacher shares parameters with the module, and with manual optimization.
    """

    phase = Phase.FREEZE
    traits = frozenset({Trait.MATCHES_FEATURES, Trait.TRAINING_ONLY})
    heads_name = "feature_matching_heads"
    helps = {"speed": (0, "fewer steps, if a teacher's features help")}

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
        if not isinstance(layers, Mapping):
            raise refusal("FeatureMatching", "layers", "a mapping from layers to layers of the teacher", layers)
        if not isinstance(widths, Mapping | None):
            raise refusal("FeatureMatching", "widths", "a mapping from keys of layers to two numbers, or null", widths)
        if not student or not layers:
            raise refusal("FeatureMatching", "student and layers", "not empty", (student, layers))
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

    def find(self, data: object) -> Teacher:
        assert self.teacher is not None
        layers = list(dict.fromkeys(self.layers.values()))
        return find_teacher(self.teacher, layers, who="FeatureMatching", data=data, argument="layers")

    def listens_to(self, module: nn.Module) -> list[str]:
        """Return the names of the student, whose arguments the teacher gets, and of its layers."""
        student = only_module(module, self.student, "FeatureMatching: student")
        inside = module.get_submodule(student)
        names = [only_module(inside, layer, "FeatureMatching: layers") for layer in self.layers]
        return [student, *(f"{student}.{name}" if name else student for name in names)]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        heads = {}
        _, *names = self.names(module)
        for i, (name, (key, layer)) in enumerate(zip(names, self.layers.items(), strict=True)):
            heads[str(i)] = self.head_between(
                [(repr(key), width_of(module, name)), self.teacher_width(layer)],
                given=(self.widths or {}).get(key),
                argument=f"widths={{{key!r}: [student's, teacher's]}}",
                projection=self.projection,
            )
        return heads

    def term(self, calls: Mapping[str, list[Call]], output: object, module: nn.Module, batch: object) -> Tensor:
        student, *names = self.names(module)
        if not calls[student]:
            raise ConfigurationError(
                f"FeatureMatching: training_step never called {student!r} (its forward): set student to the name of "
                "the submodule that it calls"
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
            features = self.features(calls[name], module, name)
            for own, (_, kwargs, _), theirs in zip(features, calls[student], teacher, strict=True):
                ours, target = match_tokens(own, theirs[layer], self.layout)
                ours = self.project(module, str(i), ours, key, target)
                terms.append(LOSSES[self.loss](ours, target, _mask(kwargs, ours)))
        if not terms:  # all layers were dropped in this step: a zero that still has a gradient
            return next(p for p in module.parameters() if p.requires_grad).sum() * 0.0
        return mean(terms)


def _mask(kwargs: Mapping[str, object], tokens: Tensor) -> Tensor | None:
    """Return the padding mask [B, N] that a language model was called with."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape[:2]:
        return mask
    return None


def _may_be_skipped(module: nn.Module, name: str) -> bool:
    """Return whether a block around the layer, or the layer, is dropped at random (StochasticDepth)."""
    return any(hasattr(module.get_submodule(part), "_drop_rate") for part in (name, *parents(name)))
