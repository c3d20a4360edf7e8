"""Feature matching: which gradients flow, what the teacher costs and keeps, and what checkpoints hold."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lit_efficient import (
    EMA,
    ConfigurationError,
    ConflictError,
    FeatureMatching,
    GradualUnfreezing,
    LoRA,
    SNRWeighting,
    cosine_loss,
)
from lit_efficient.export.adapters import export_checkpoint, merge_state
from tests.support import WIDTH, Toy, assert_equal, data, trainer, weights


class Teacher(nn.Module):
    """Counts its calls."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.stem = nn.Linear(WIDTH, width)
            self.top = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.top(self.stem(x).tanh())


def matching(teacher=None, layers=None, **arguments) -> FeatureMatching:
    return FeatureMatching("net", teacher or Teacher(), layers or {r"blocks\.1": "stem"}, **arguments)


def fit(callbacks, module=None, **arguments):
    torch.manual_seed(0)
    module = module or Toy()
    run = trainer(callbacks, **arguments)
    run.fit(module, data(), data(), ckpt_path=arguments.pop("ckpt_path", None))
    return run


class Gradients(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_after_backward(self, trainer, pl_module) -> None:
        self.steps.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})


class Silent(Toy):
    """Its own loss has no gradient, and is a plain tensor."""

    def training_step(self, batch, batch_idx):
        return self._sample_loss(batch).mean() * 0.0


def test_gradients_reach_the_layers_up_to_the_chosen_one_the_head_and_nothing_else():
    seen, module = Gradients(), Silent()
    fit([matching(), seen], module, max_steps=1)
    moved = {name.rpartition(".")[0] for name, gradient in seen.steps[0].items() if gradient.abs().sum() > 0}
    expected = {"net.stem", "feature_matching_heads.0"}
    expected |= {f"net.blocks.{i}.{part}" for i in (0, 1) for part in ("norm", "up", "down")}
    assert moved == expected


def test_the_term_is_the_pure_function_of_the_features():
    seen, module, teacher = Gradients(), Silent(), Teacher()
    twin = copy.deepcopy(module)
    fit([matching(teacher, weight=0.7), seen], module, max_steps=1)
    (x,) = next(iter(data()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, 12)
    hidden = twin.net.blocks[1](twin.net.blocks[0](twin.net.stem(x)))
    (0.7 * cosine_loss(head(hidden)[:, None], teacher.stem(x)[:, None])).backward()
    torch.testing.assert_close(seen.steps[0]["net.stem.weight"], twin.net.stem.weight.grad)
    torch.testing.assert_close(seen.steps[0]["feature_matching_heads.0.weight"], head.weight.grad)


def test_the_teacher_stays_as_it_is_and_outside_of_everything(tmp_path):
    teacher, module = Teacher(), Toy()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    run = fit([matching(teacher), EMA(decay=0.5)], module)
    assert_equal(before, dict(teacher.state_dict()))
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    own = {id(p) for p in teacher.parameters()}
    assert not own & {id(p) for p in module.parameters()}
    assert not own & {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert not any(part is teacher for part in module.modules())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == Toy().state_dict().keys()
    sizes = {tuple(t.shape) for t in checkpoint["lit_efficient"]["training_only"].values()}
    assert sizes == {(12, WIDTH), (12,)}  # the head, beside the weights


def test_the_head_is_stepped_even_where_the_optimizer_was_built_over_the_network_alone():
    module = Toy("configure_model")  # its optimizer holds net.parameters()
    run = fit([matching(projection="mlp")], module)
    heads = list(module.feature_matching_heads.parameters())
    assert [any(p is q for q in run.optimizers[0].param_groups[0]["params"]) for p in heads] == [True] * 6
    fresh = Toy()
    fit([matching(projection="mlp")], fresh, max_steps=1)
    assert not torch.equal(heads[0], next(fresh.feature_matching_heads.parameters()))


@pytest.mark.turns(4, family="learns")
@pytest.mark.parametrize("loss", ["cosine", "l2"])
def test_the_term_falls(loss):
    values = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            values.append(float(trainer.callback_metrics["train/feature_matching"]))

    fit([matching(loss=loss, weight=3.0), Watch()], Silent(), max_epochs=12)
    assert values[-1] < 0.5 * values[0]


def test_from_stop_at_on_the_teacher_is_not_called_and_gradients_are_those_without_it():
    teacher, with_term = Teacher(), Gradients()
    module = Toy()
    states = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_) -> None:
            states.append(weights(pl_module))

    fit([matching(teacher, stop_at=2), with_term, Keep()], module)
    assert teacher.calls == 2
    head = "feature_matching_heads.0.weight"
    assert [head in step for step in with_term.steps] == [True, True, False, False]
    for i, (x,) in enumerate(data()):  # the same weights, the same batch, no technique
        plain = Toy()
        plain.net.load_state_dict({k.removeprefix("net."): t for k, t in states[i].items() if k.startswith("net.")})
        plain._sample_loss((x,)).mean().backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        same = all(torch.equal(with_term.steps[i][name], gradient) for name, gradient in expected.items())
        assert same is (i >= 2)


def test_exports_and_plain_loading_know_nothing_of_the_head(tmp_path):
    from safetensors.torch import load_file

    run = fit([matching(), LoRA(rank=2)], Toy("configure_model"))
    for alone in (True, False):
        path = tmp_path / f"{alone}.ckpt"
        run.save_checkpoint(path, weights_only=alone)
        checkpoint = torch.load(path, weights_only=True)
        assert not [key for key in checkpoint["state_dict"] if "feature_matching" in key]
        tensors = checkpoint["lit_efficient"]["training_only"]
        assert [tensor is None for tensor in tensors.values()] == [alone] * 2
    run = fit([matching()], module := Toy())
    run.save_checkpoint(tmp_path / "b.ckpt", weights_only=False)
    folder = export_checkpoint(tmp_path / "b.ckpt", tmp_path / "out", "safetensors", check=False)
    assert load_file(folder / "model.safetensors").keys() == Toy().state_dict().keys()
    assert merge_state(torch.load(tmp_path / "b.ckpt", weights_only=True)).keys() == Toy().state_dict().keys()
    plain = Toy()
    trainer().test(plain, data(), ckpt_path=tmp_path / "b.ckpt", verbose=False)  # strict, without the technique
    assert torch.equal(plain.net.head.weight, module.net.head.weight)
    module.load_state_dict(Toy().state_dict())  # and a base's weights load beside the head


def test_it_is_added_to_a_plain_loss_to_a_dict_and_beside_weighted_samples():
    class Dict(Toy):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx)["loss"], "note": 1}

    plain, keyed = Toy(protocol=False), Dict()
    for module in (plain, keyed):
        fit([matching()], module)
    assert_equal(weights(plain), weights(keyed))
    seen = Gradients()

    class Weightless(SNRWeighting):
        def sample_weights(self, output, module):
            return torch.zeros_like(output["sample_loss"])

    fit([Weightless(), matching(), seen], Toy(), max_steps=1)
    silent = Gradients()
    fit([matching(), silent], Silent(), max_steps=1)
    assert_equal(seen.steps[0], silent.steps[0])


def test_the_head_trains_on_a_frozen_base_and_under_gradual_unfreezing():
    module = Toy("configure_model")
    fit([matching(), LoRA(rank=2)], module)
    assert module.feature_matching_heads["0"].weight.requires_grad
    fit([matching(), GradualUnfreezing(every_n_steps=1)], Toy("configure_model"))


def test_a_transformers_language_model_teaches_another_one(tmp_path):
    from transformers import LlamaConfig

    shape = {"vocab_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaConfig(**shape, hidden_size=24, num_hidden_layers=3).save_pretrained(tmp_path)

    class Language(nn.Module):
        takes_labels = False

        def __init__(self) -> None:
            super().__init__()
            from transformers import LlamaForCausalLM

            self.lm = LlamaForCausalLM(LlamaConfig(**shape, hidden_size=WIDTH, num_hidden_layers=2))

        def forward(self, x):
            tokens = (2 * x + 8).long().clamp(0, 15)
            mask = torch.ones_like(tokens)
            mask[:, -2:] = 0
            return self.lm(input_ids=tokens, attention_mask=mask, labels=tokens).logits  # [B, WIDTH, 16]

    seen = Gradients()
    technique = FeatureMatching("lm", str(tmp_path / "config.json"), {r"model\.layers\.0": r"layers\.1"})
    module = LanguageToy(network=Language)
    fit([technique, seen], module, max_steps=1, limit_val_batches=0)
    assert module.feature_matching_heads["0"].weight.shape == (24, WIDTH)
    assert seen.steps[0]["feature_matching_heads.0.weight"].abs().sum() > 0


class LanguageToy(Toy):
    def _sample_loss(self, batch):
        return self.net(batch[0]).square().mean((1, 2))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_what_cannot_work_is_refused_by_name():
    for arguments, message in (
        ({"loss": "l1"}, "loss must be one of cosine, l2, got 'l1'"),
        ({"projection": "deep"}, "projection must be one of none, linear, mlp"),
        ({"weight": -1.0}, "weight must be at least 0, got -1.0"),
        ({"stop_at": 0}, "stop_at must be a whole number of at least 1 or null, got 0"),
        ({"layers": {"x": ""}, "widths": {"y": [1, 2]}}, "widths must be two numbers of at least 1 .*, got {'y': "),
    ):
        with pytest.raises(ConfigurationError, match=message):
            matching(**arguments)
    for technique, message in (
        (matching(layers={"blocks": "nothing"}), "pattern 'nothing' matches none"),
        (matching(layers={r"blocks\.\d+": ""}), "matches 4 modules"),
        (matching(projection="none"), r"needs equal widths, but 'blocks\\\\.1' has 16 and the teacher's 'stem' has 12"),
        (matching(layers={r"blocks\.0": ""}), "the width of the features of the teacher's '' is unknown"),
        (FeatureMatching("head", Teacher(), {"": "stem"}, widths={"": [3, 12]}), "has features of width 16.*for 3"),
        (FeatureMatching("net", "no/such-folder", {"": ""}), "teacher must be a module, data.NAME, or"),
        (FeatureMatching("net", "data.judge", {"": ""}), "no data module has no such network"),
        (FeatureMatching("blocks", Teacher(), {"0": ""}, widths={"0": [16, 12]}), "never called 'net.blocks'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            fit([technique])
    with pytest.raises(ConflictError, match="uses manual optimization"):
        fit([matching()], Toy(optimizers=2))
    module = Toy()
    with pytest.raises(ConflictError, match="shares parameters"):
        fit([FeatureMatching("net", module.net, {"head": "head"})], module)


def test_another_teacher_is_noticed_on_resume(tmp_path):
    fit([matching()]).save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    other = Teacher()
    nn.init.zeros_(other.stem.weight)
    run = trainer([matching(other)], max_epochs=2)
    with pytest.raises(ConfigurationError, match="FeatureMatching has changed: teacher was 'given in code: Teacher"):
        run.fit(Toy(), data(), data(), ckpt_path=tmp_path / "a.ckpt")
