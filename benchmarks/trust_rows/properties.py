"""Row 14: properties that hold for any input. Hypothesis draws the inputs and shrinks those that fail."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trust_rows import Piece

CASES = 100
EXAMPLES = 30


def _piece(
    name: str, sentence: str, make: Callable[[], tuple[Callable[..., None], dict[str, Any]]], examples: int
) -> Piece:
    """Return a piece whose cases are seeds. Each seed draws a number of examples."""

    def trial(case: str, folder: Path) -> str:
        from hypothesis import HealthCheck, Phase, given, seed, settings
        from hypothesis.configuration import set_hypothesis_home_dir

        set_hypothesis_home_dir(folder)
        check, drawn = make()
        phases = (Phase.generate, Phase.shrink)
        options: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        holds = settings(max_examples=examples, phases=phases, print_blob=False, **options)(given(**drawn)(check))
        try:
            seed(int(case.rpartition("-")[2]))(holds)()
        except Exception as error:
            notes = " ".join(" ".join(getattr(error, "__notes__", [])).split())
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} {notes[:600]}"
        return ""

    return Piece(
        14,
        f"property-{name}",
        sentence,
        lambda: [f"seed-{i}" for i in range(CASES)],
        trial,
        in_ci=1 if examples < 5 else 2,
    )


def _close(found: Any, expected: Any, what: str, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    found = torch.as_tensor(found).double()
    expected = torch.as_tensor(expected).double()
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} and not {tuple(expected.shape)}"
    off = (found - expected).abs() - atol - rtol * expected.abs()
    assert bool((off <= 0).all()), f"{what}: {found.flatten()[:4].tolist()} and not {expected.flatten()[:4].tolist()}"


# Packing --------------------------------------------------------------------------------------------------------------


def _packing() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from lit_efficient.data.text.collate import packed_batch
    from lit_efficient.data.text.packing import pack_lengths
    from lit_efficient.data.text.truncation import Counts, cut
    from lit_efficient.losses.next_token import IGNORE
    from lit_efficient.models.networks.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(40, dim=8, depth=2, num_heads=2, hidden_dim=16, max_length=64)).double().eval()

    def check(capacity: int, lengths: list[int], texts: list[bool], side: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        documents = []
        trained = []
        for length, text in zip(lengths, texts):
            documents.append(rng.integers(1, 40, length))
            trained.append(np.ones(length, bool) if text else rng.random(length) < 0.5)
        facts = []
        for learned, text in zip(trained, texts):
            places = 1 + np.flatnonzero(learned[1:])
            first, last = (int(places[0]), int(places[-1])) if len(places) else (len(learned), 0)
            facts.append((len(learned), first, last, len(places), int(text)))
        counts = Counts()
        pieces = cut(np.array(facts), capacity, side, counts)  # type: ignore[arg-type]
        assert all(1 <= n <= capacity for n in pieces.lengths.tolist()), "a piece is too long"
        for number, text in enumerate(texts):  # each token of a text is an input or a label where it should be
            own = [(int(a), int(b)) for d, a, b in zip(pieces.document, pieces.start, pieces.stop) if d == number]
            if text and lengths[number] > 1:
                predicted = [t for a, b in own for t in range(a + 1, b)]
                assert predicted == list(range(1, lengths[number])), f"tokens {predicted} of a text are predicted"
            if not text and lengths[number] <= capacity and facts[number][3]:
                assert own == [(0, lengths[number])], f"a conversation that fits was cut: {own}"
        lost = sum(n for n, text in zip(lengths, texts) if not text) - sum(
            int(b - a) for d, a, b in zip(pieces.document, pieces.start, pieces.stop) if not texts[d]
        )
        lost += sum(n for n, text in zip(lengths, texts) if text and n == 1)
        assert counts.tokens_lost <= lost + capacity * len(lengths)
        bins = pack_lengths(pieces.lengths, capacity)
        assert sorted(i for items in bins for i in items.tolist()) == list(range(len(pieces))), (
            "a piece is lost or twice"
        )
        assert all(pieces.lengths[items].sum() <= capacity for items in bins), "a row is too long"
        if not len(pieces):
            return
        rows = []
        for items in bins:
            spans = [(int(pieces.document[i]), int(pieces.start[i]), int(pieces.stop[i])) for i in items.tolist()]
            rows.append([(documents[d][a:b], np.where(trained[d], documents[d], IGNORE)[a:b]) for d, a, b in spans])
        batch = packed_batch(rows, capacity, pad_id=0)
        with torch.no_grad():
            logits = model(batch["input_ids"], position_ids=batch["position_ids"])
        for row, members in enumerate(rows):
            at = 0
            for ids, labels in members:
                until = at + len(ids)
                expected = labels.copy()
                expected[0] = IGNORE
                assert batch["input_ids"][row, at:until].tolist() == ids.tolist(), "tokens are not the document's"
                assert batch["labels"][row, at:until].tolist() == expected.tolist(), "labels are not the document's"
                assert batch["position_ids"][row, at:until].tolist() == list(range(len(ids))), (
                    "positions do not restart"
                )
                with torch.no_grad():
                    alone = model(torch.tensor(ids)[None])[0]
                _close(logits[row, at:until], alone, "a document's logits beside others")
                at = until
            assert (batch["labels"][row, at:] == IGNORE).all(), "the filling is learned"

    sizes = st.integers(2, 24).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.tuples(st.integers(1, 2 * n), st.booleans()), min_size=1, max_size=8)
        )
    )
    sides = st.sampled_from(["right", "left", "drop"])

    def unpacked(of: tuple[int, list[tuple[int, bool]]], side: str, seed: int) -> None:
        check(of[0], [n for n, _ in of[1]], [text for _, text in of[1]], side, seed)

    return unpacked, {"of": sizes, "side": sides, "seed": st.integers(0, 2**16)}


# Targets and weights of noise levels ----------------------------------------------------------------------------------

SCHEDULES = ("flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm")
PREDICTIONS = ("eps", "x0", "v", "flow", "edm")
PAPERS: dict[str, Callable[[float, float], float]] = {  # the weight of x0's error
    "min_snr": min,
    "soft_min_snr": lambda snr, gamma: 1 / (1 / snr + 1 / gamma),
    "p2": lambda snr, gamma: snr / (1 + snr) ** gamma,
    "debiased": lambda snr, gamma: math.sqrt(snr),
    "truncated": lambda snr, gamma: max(snr, 1.0),
}


def _processes(st: Any) -> Any:
    from lit_efficient.losses.noise_process import TABLES, DiffusionProcess

    return st.builds(
        lambda schedule, zero, data: DiffusionProcess(
            schedule, zero_terminal_snr=zero and schedule in TABLES, sigma_data=data
        ),
        st.sampled_from(SCHEDULES),
        st.booleans(),
        st.sampled_from([0.5, 1.0, 2.0]),
    )


def _targets() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from lit_efficient.losses.diffusion import add_noise, convert, target, to_x0_eps
    from lit_efficient.losses.snr import GAMMAS, snr_weight

    def check(process: Any, t: float, one: str, other: str, rule: str, gamma: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        x0, eps = (torch.randn(2, 3, generator=draw, dtype=torch.float64) for _ in range(2))
        times = process.on_grid(torch.full((2,), t, dtype=torch.float64))
        alpha, sigma = (float(a[0]) for a in process.alpha_sigma(times))
        x = add_noise(x0, eps, times, process)
        _close(x, alpha * x0 + sigma * eps, "the noisy data")
        said = target(x0, eps, times, process, one)
        worst = 1e-11 * max(1.0, sigma / max(alpha, 1e-30), alpha / max(sigma, 1e-30)) ** 2
        if worst < 1e-5:
            found = to_x0_eps(said, x, times, process, one)
            _close(found[0], x0, f"x0 from {one}", worst, worst)
            _close(found[1], eps, f"eps from {one}", worst, worst)
            there = convert(said, x, times, process, one, other)
            _close(there, target(x0, eps, times, process, other), f"{other} from {one}", worst, worst)
            _close(convert(there, x, times, process, other, one), said, f"{one} by {other}", worst, worst)
        # The weight, by the slope of the target with respect to x0 at this noisy sample: (dT/dx0)^2 as autograd has it.
        log_snr = process.log_snr(times)
        preserving = process.schedule not in ("flow", "edm")
        fits = {"eps": True, "x0": True, "v": preserving, "flow": process.schedule == "flow", "edm": True}
        if not (fits[one] and 1e-6 < alpha / max(sigma, 1e-30) < 1e6):
            return
        data = x0[:1, :1].clone().requires_grad_()
        noise = (x[:1, :1] - alpha * data) / sigma
        made = target(data, noise, times[:1], process, one)
        (slope,) = torch.autograd.grad(made.sum(), data)
        snr = (alpha / sigma) ** 2
        given = gamma if rule in GAMMAS else None
        expected = PAPERS[rule](snr, gamma) / float(slope) ** 2
        data_scale = process.sigma_data if one == "edm" else 1.0
        weight = snr_weight(log_snr, rule, given, one, sigma_data=data_scale)
        _close(weight, torch.full((2,), expected, dtype=torch.float64), f"weight {rule} of {one}", 1e-6, 0.0)

    times = st.floats(0.001, 1.0)
    rules = st.sampled_from(sorted(PAPERS))
    return check, {
        **{"process": _processes(st), "t": times, "one": st.sampled_from(PREDICTIONS), "rule": rules},
        **{"other": st.sampled_from(PREDICTIONS), "gamma": st.floats(0.1, 20.0), "seed": st.integers(0, 2**16)},
    }


# Averages -------------------------------------------------------------------------------------------------------------


def _averages() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from lit_efficient.mechanisms.averages import weights as w

    def ema(path: list[Tensor], decays: list[float]) -> Tensor:
        average = path[0].clone()
        for point, decay in zip(path, decays, strict=True):
            w.update_([average], [point], decay)
        return average

    def check(steps: int, decay: float, warmup: str | None, power: float, sigma: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        a, b = (list(torch.randn(steps, 5, generator=draw, dtype=torch.float64)) for _ in range(2))
        decays = [w.decay_at(n, decay, warmup, power) for n in range(steps)]
        assert decays[0] == 0
        assert all(0 <= d <= decay for d in decays), "a decay is beyond the one that is reached in the end"
        assert decays == sorted(decays), "the warm-up falls"
        shares = [(1 - d) * math.prod(decays[n + 1 :]) for n, d in enumerate(decays)]
        _close(sum(shares), 1.0, "the shares of the steps")
        _close(ema(a, decays), sum(s * x for s, x in zip(shares, a)), "the average")
        _close(ema([2 * x - 3 * y for x, y in zip(a, b)], decays), 2 * ema(a, decays) - 3 * ema(b, decays), "linear")
        narrow = [x.float() for x in a]
        half = torch.zeros(5)
        for point, d in zip(narrow, decays):
            w.update_([half], [point.bfloat16()], d)
        _close(half, ema([x.bfloat16().double() for x in narrow], decays), "an average of bfloat16", 1e-5, 1e-5)
        # Power-function averages: step i of T holds (i^(g+1) - (i-1)^(g+1)) / T^(g+1).
        gamma = w.gamma_of(sigma)
        _close(math.sqrt((gamma + 1) / (gamma + 2) ** 2 / (gamma + 3)), sigma, "the width", 1e-6)
        profile = [(n / steps) ** (gamma + 1) - ((n - 1) / steps) ** (gamma + 1) for n in range(1, steps + 1)]
        powers = [w.power_decay(n, gamma) for n in range(1, steps + 1)]
        _close(ema(a, powers), sum(s * x for s, x in zip(profile, a)), "the power-function average", 1e-7, 1e-9)
        # Averages of averages.
        kinds = [w.position_weights(steps, kind) for kind in ("uniform", "linear", "exponential")]
        for kind in kinds:
            _close(sum(kind), 1.0, "weights of positions")
            (mean,) = w.weighted_mean([[x] for x in a], kind)
            _close(mean, sum(s * x for s, x in zip(kind, a)), "the mean")
        cut = 1 + seed % steps
        if cut < steps:
            parts = [w.weighted_mean([[x] for x in part], [1 / len(part)] * len(part)) for part in (a[:cut], a[cut:])]
            (whole,) = w.weighted_mean(parts, [cut / steps, 1 - cut / steps])
            _close(whole, sum(a) / steps, "the mean of two means")
        # What is tracked comes back as it is.
        ends = sorted({max(1, steps // 3), max(1, 2 * steps // 3), steps})
        stored = [(end, width) for end in ends for width in (sigma, sigma / 2)]
        mixed = w.synthesis_weights([end for end, _ in stored], [width for _, width in stored], steps, sigma)
        _close(sum(mixed), 1.0, "weights of a synthesis", 1e-6, 1e-6)
        expected = [float(one == (steps, sigma)) for one in stored]
        _close(torch.tensor(mixed), torch.tensor(expected), "the synthesis of a width that was tracked", 1e-4, 1e-4)

    return check, {
        **{"steps": st.integers(1, 40), "decay": st.floats(0.0, 0.9999), "power": st.floats(0.3, 1.5)},
        **{"warmup": st.sampled_from([None, "inverse_gamma", "tf"]), "sigma": st.floats(0.02, 0.28)},
        "seed": st.integers(0, 2**16),
    }


def _averaged_runs() -> tuple[Callable[..., None], dict[str, Any]]:
    import lightning.pytorch as L
    from hypothesis import strategies as st

    from lit_efficient import EMA, PowerEMA
    from lit_efficient.mechanisms.averages.weights import decay_at, gamma_of

    class Line(L.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    class Path_(L.Callback):
        def __init__(self) -> None:
            self.points: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step > len(self.points):
                self.points.append(module.layer.weight.detach().clone())

    def check(steps: int, decay: float, warmup: str | None, every: int, start: int, accumulate: int, seed: int) -> None:
        L.seed_everything(seed, verbose=False)
        path = Path_()
        ema = EMA(decay, warmup, every_n_steps=every, start_step=start)
        power = PowerEMA([0.1, 0.2], 10**6)
        logging.disable(logging.INFO)
        try:
            trainer = L.Trainer(
                **{
                    "accelerator": "cpu",
                    "devices": 1,
                    "logger": False,
                    "max_steps": steps,
                    "enable_progress_bar": False,
                },
                **{"enable_checkpointing": False, "enable_model_summary": False, "accumulate_grad_batches": accumulate},
                callbacks=[ema, power, path],
            )
            module = Line(3)
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(steps * accumulate * 2, 3), 2))
        finally:
            logging.disable(logging.NOTSET)
        assert len(path.points) == steps
        due = [n for n in range(start, steps) if n % every == 0]
        average = ema.average(module)
        assert (average is None) == (not due), f"updates were due after the steps {due}"
        if average is not None:
            expected = path.points[due[0]].double()
            for n in due[1:]:
                expected = expected + (1 - decay_at(n - start, decay, warmup)) * (path.points[n] - expected)
            _close(average["layer.weight"], expected, "EMA", 1e-5, 1e-6)
            shares = ema.shares(steps)
            assert shares is not None
            told = sum(s * x.double() for s, x in zip(shares, path.points))
            _close(average["layer.weight"], told, "EMA by the shares that it tells", 1e-5, 1e-6)
        for width, found in zip((0.1, 0.2), power.state_dict()["averages"]):
            g = gamma_of(width) + 1
            shares = [(n / steps) ** g - ((n - 1) / steps) ** g for n in range(1, steps + 1)]
            _close(
                found["layer.weight"], sum(s * x.double() for s, x in zip(shares, path.points)), "PowerEMA", 1e-5, 1e-6
            )

    return check, {
        **{"steps": st.integers(1, 9), "decay": st.floats(0.0, 0.999), "every": st.integers(1, 4)},
        **{"warmup": st.sampled_from([None, "inverse_gamma", "tf"]), "start": st.integers(0, 4)},
        **{"accumulate": st.integers(1, 2), "seed": st.integers(0, 2**16)},
    }


# Merged adapters ------------------------------------------------------------------------------------------------------


def _merges() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from lit_efficient import merge_adapters
    from lit_efficient.mechanisms.adapters.activated import ACTIVATED
    from lit_efficient.mechanisms.adapters.low_rank import ON_INT4, VARIANTS, add_low_rank
    from lit_efficient.mechanisms.adapters.quantized import SOURCE, dequantize, quantize_linear
    from lit_efficient.mechanisms.adapters.starts import FROM_ROUNDING, SUBTRACTED

    def half_step(layer: Any, weight: Tensor) -> Tensor:
        """By how much each weight may have been rounded, from the numbers that the layer holds."""
        if layer.quant_format == "int4":
            return layer.weight_scale.repeat_interleave(layer.group_size, 1) / 2
        if layer.quant_format == "int8":
            rows = weight.abs().amax(1, keepdim=True)
            return rows / 127 / 2 + rows * 2**-10  # bitsandbytes rounds to float16 first
        code = layer.weight.quant_state.code.double().sort().values
        blocks = weight.flatten().double().split(64)
        found = []
        for block in blocks:
            place = block / block.abs().max().clamp(min=1e-30)
            at = torch.searchsorted(code, place).clamp(1, len(code) - 1)
            found.append((code[at] - code[at - 1]) / 2 * block.abs().max())
        return torch.cat(found).view_as(weight)

    def check(form: str, variant: str, groups: int, out: int, rank: int, scale: float, double: bool, seed: int) -> None:
        group = 16
        if form != "int4" and variant in ON_INT4:
            variant = "lora"
        torch.manual_seed(seed)
        layer: Any = nn.Linear(64 * groups, out, bias=bool(seed % 2))
        if form == "float":
            layer.weight.requires_grad_(False)
        weight = layer.weight.detach().clone()
        quantised = layer if form == "float" else quantize_linear(layer, form, double_quant=double, group_size=group)
        base = weight if form == "float" else dequantize(quantised).clone()
        if form != "float":
            # Scales that are quantised themselves are off by a part of the block's largest number.
            slack = 0.04 * weight.abs().max() if double and form in ("nf4", "fp4") else 1e-6
            most = half_step(quantised, weight) + slack
            worst = ((base - weight).abs() - most).max()
            assert worst <= 0, f"{form} rounds by {worst:.2e} more than half a step"
        zeros = quantised.weight_zero.clone() if form == "int4" else None
        if variant == ACTIVATED or (variant == FROM_ROUNDING and form == "float"):
            variant = "lora"  # it does not merge, or has nothing to start from
        elif variant == FROM_ROUNDING:
            quantised.__dict__[SOURCE] = weight
        add_low_rank(quantised, "layer", rank=rank, alpha=rank * scale, variant=variant, seed=seed)
        network = nn.Sequential(quantised)
        x = torch.randn(4, 64 * groups)
        with torch.no_grad():
            for name, p in quantised.named_parameters():
                if name.startswith("lora_"):
                    p.add_(0.05 * torch.randn_like(p))
            a = quantised.lora_A.clone()
            b = quantised.lora_B.clone()
            s = quantised.lora_scale
            started = quantised.lora_B0 @ quantised.lora_A0 if variant in SUBTRACTED else 0.0
            delta = s * (b @ a - started)
            delta = delta.repeat_interleave(group, 1) if variant == "qalora" else delta
            wanted = base + delta
            if variant == "dora":
                wanted = wanted * (quantised.lora_magnitude / wanted.norm(dim=1))[:, None]
            before = network(x)
            merge_adapters(network)
            merged = dequantize(network[0]) if variant in ON_INT4 else network[0].weight
            rounded = torch.zeros(())
            if variant == "rounded":  # to the grid of the base, whose ends are as far as it reaches
                scales, zeros = (t.repeat_interleave(group, 1) for t in (network[0].weight_scale, zeros))
                wanted = wanted.clamp(min=-zeros * scales, max=(15 - zeros) * scales)
                rounded = scales / 2
            off = (merged - wanted).abs() - rounded
            assert off.max() <= 2e-5, f"{form}, {variant}: merged weights are {off.max():.1e} off"
            _close(network(x), before, f"{form}, {variant}: what it computes", 1e-4, 1e-4)

    return check, {
        **{"form": st.sampled_from(["float", "int4", "int8", "nf4", "fp4"]), "variant": st.sampled_from(VARIANTS)},
        **{"groups": st.integers(1, 2), "out": st.integers(1, 4).map(lambda n: 8 * n), "rank": st.integers(1, 6)},
        **{"scale": st.floats(0.1, 4.0), "double": st.booleans(), "seed": st.integers(0, 2**16)},
    }


# Samplers -------------------------------------------------------------------------------------------------------------


def _samplers() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from lit_efficient.errors import ConfigurationError
    from lit_efficient.losses.diffusers_sampling import sample_with_diffusers
    from lit_efficient.losses.diffusion import check_prediction, target
    from lit_efficient.losses.diffusion_sampling import Sampler, ddim_sample, sampling_times

    even = torch.quasirandom.SobolEngine(1, scramble=True, seed=0).draw(255, dtype=torch.float64)
    noise = math.sqrt(2) * torch.erfinv((2 * even - 1).clamp(-1 + 1e-6, 1 - 1e-6))
    noise = (noise - noise.mean()) / noise.std(correction=0)

    def predictor(process: Any, prediction: str, mean: float, spread: float) -> Callable[[Tensor, Tensor], Tensor]:
        """What a perfect network says of data that is normal."""

        def predict(x: Tensor, t: Tensor) -> Tensor:
            x = x.double()
            t = t.double()
            alpha, sigma = (a[:, None] for a in process.alpha_sigma(t))
            variance = (alpha * spread) ** 2 + sigma**2
            away = x - alpha * mean
            x0 = mean + alpha * spread**2 / variance * away
            eps = sigma / variance * away
            return target(x0, eps, t, process, prediction)  # type: ignore[arg-type]

        return predict

    def sampled(process: Any, prediction: Any, name: Any, steps: int, mean: float, spread: float) -> Tensor:
        predict = predictor(process, prediction, mean, spread)
        if name == "builtin":
            return ddim_sample(predict, noise, sampling_times(steps, prediction, process), process, prediction)
        return sample_with_diffusers(predict, noise, steps, process, prediction, Sampler(name)).double()

    def check(process: Any, prediction: Any, name: Any, steps: int, mean: float, spread: float) -> None:
        noisy = process.ends_in_noise
        wanted = prediction == "eps" and (process.zero_terminal_snr or (name != "builtin" and noisy))
        wanted |= name == "heun" and (process.schedule == "edm" or (process.schedule != "flow" and noisy))
        try:
            check_prediction("task", prediction, process)
            point = sampled(process, prediction, name, steps, mean, 0.0)
            refused = ""
        except ConfigurationError as error:
            refused = str(error)
        assert bool(refused) == wanted, refused or "is not refused"
        if refused:
            return
        # Data that is one point: the equation is linear, and any number of steps ends there.
        _close(point.mean(), mean, "the mean of one point", 1e-3, 2e-3)
        assert point.std(correction=0) < 2e-3, f"one point is spread by {point.std(correction=0):.1e}"
        few, many = (sampled(process, prediction, name, n, mean, spread) for n in (25, 125))
        for samples in (few, many):
            assert samples.isfinite().all(), "samples are not finite"
        # Where the equation ends that begins at standard normal noise, whatever of the data is left there.
        first = sampling_times(1, prediction, process)[:1].double() if name == "builtin" else torch.ones(1).double()
        alpha, sigma = (float(a) for a in process.alpha_sigma(first))
        scale = spread / math.hypot(alpha * spread, sigma)
        wrong = [abs(float(x.std(correction=0)) / (scale * process.prior_scale) - 1) for x in (few, many)]
        assert wrong[1] < max(0.6 * wrong[0], 0.01), f"more steps do not help: the spread is off by {wrong}"
        assert wrong[1] < 0.08, f"the spread is off by {wrong[1]:.1%} after 125 steps"
        shifted = abs(float(many.mean()) - (mean - scale * alpha * mean)) / spread
        assert shifted < 0.02, f"the mean is off by {shifted:.3f} of the spread after 125 steps"

    names = ("builtin", "ddim", "euler", "heun", "dpmsolver++")
    return check, {
        **{"process": _processes(st), "prediction": st.sampled_from(PREDICTIONS), "name": st.sampled_from(names)},
        **{"steps": st.sampled_from([4, 5, 8, 20]), "mean": st.floats(-1.0, 1.0), "spread": st.floats(0.3, 1.5)},
    }


# Chat masks -----------------------------------------------------------------------------------------------------------

WORDS = (
    *(
        "yes",
        "No.",
        "four",
        "Two",
        "user",
        "assistant",
        "model",
        "USER:",
        "ASSISTANT:",
        "### Response:",
        "INST",
        "def f(x):",
    ),
    *(
        "\n",
        "\n\n",
        "    ",
        "  ",
        "{",
        "}",
        "{{",
        "%}",
        "<think>",
        "</think>",
        "<b>",
        "é",
        "漢字",
        "🙂",
        "Ω",
        "1,000",
        "-",
        "#",
    ),
)


@cache
def _tokenizer(kind: str, control: tuple[str, ...]) -> Any:
    """A small tokenizer: of bytes, as GPT-2's, or of words with a mark for spaces, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", *control]
    texts = [" ".join(WORDS), *WORDS, "What is two plus two? Four, of course.\n\nYes: it is.\n"] * 3
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        alphabet = []
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=list(control)
    )


def _masks() -> tuple[Callable[..., None], dict[str, Any]]:
    from hypothesis import strategies as st

    from benchmarks.trust_rows.chat_templates import FAMILIES
    from lit_efficient.data.text.chat_formats import Document
    from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded

    def check(
        family: str, kind: str, train_on: Any, system: str | None, turns: list[tuple[str, str]], last: bool
    ) -> None:
        known = FAMILIES[family]
        messages = [{"role": "system", "content": system}] if system and known.system else []
        for asked, said in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        messages += [{"role": "user", "content": "And now?"}] * last
        tokenizer = _tokenizer(kind, known.control)
        tokenizer.chat_template = known.template
        encoder = ChatTokens(tokenizer, train_on)
        (found,) = encoder.encode([Document(messages=tuple(messages))])
        parts = known.parts(messages)
        text = "".join(part for part, _ in parts)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text, "the template is not what its parts say"
        assert isinstance(found, Encoded), f"refused: {found}"
        ends = list(itertools.accumulate(len(part) for part, _ in parts))
        spans = [(end - len(part), end) for end, (part, said) in zip(ends, parts) if said]
        if train_on == "completion":
            spans = spans[-1:]
        elif train_on == "all":
            spans = [(0, len(text))]
        own = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert own["input_ids"] == found.ids.tolist(), "the tokens are not those of the text"
        for number, (start, stop) in enumerate(own["offset_mapping"]):
            letters = [i for i in range(start, stop) if not text[i].isspace()]
            if letters:  # white space at an edge may share a token with what is on either side
                inside = {any(begin <= i < end for begin, end in spans) for i in letters}
                assert len(inside) == 1, f"{text[start:stop]!r} lies on an edge"
                wrong = "not learned" if inside == {True} else "learned"
                assert bool(found.trained[number]) in inside, f"{text[start:stop]!r} of {text!r} is {wrong}"
        counted = 1 if train_on in ("completion", "all") else len(turns)
        assert train_on == "all" or (found.turns, found.ended) == (counted, counted), (found.turns, found.ended)

    said = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
    said = (
        st.tuples(said, st.sampled_from(["yes", "Four.", "漢", "#1"]))
        .map(lambda two: two[1] + " " + two[0])
        .map(str.strip)
    )
    return check, {
        **{"family": st.sampled_from(sorted(FAMILIES)), "kind": st.sampled_from(["bytes", "words"])},
        **{"train_on": st.sampled_from(["assistant", "completion", "all"]), "system": st.none() | said},
        **{"turns": st.lists(st.tuples(said, said), min_size=1, max_size=4), "last": st.booleans()},
    }


PIECES = (
    _piece(
        "packing",
        "Documents of random lengths are cut and packed: each token once, none sees others, positions restart",
        _packing,
        14,
    ),
    _piece(
        "targets",
        "Any prediction under any noise schedule gives data and noise back; its SNR weight is the paper's, by autograd",
        _targets,
        2 * EXAMPLES,
    ),
    _piece(
        "averages",
        "Decays, power-function profiles, means of means: linear, and equal to the formulas",
        _averages,
        EXAMPLES,
    ),
    _piece(
        "averaged-runs",
        "EMA and PowerEMA of a fit equal their formulas over the path of its weights",
        _averaged_runs,
        4,
    ),
    _piece(
        "merges",
        "A layer of any format with an adapter of any variant: merged weights within half a step of W + s B A",
        _merges,
        EXAMPLES,
    ),
    _piece(
        "samplers",
        "Each schedule, prediction and sampler draws one point exactly, normal data with its mean and spread",
        _samplers,
        10,
    ),
    _piece(
        "chat-masks",
        "Random conversations in 15 families' templates: what is learned is the assistant's text and its end, no more",
        _masks,
        EXAMPLES,
    ),
)
