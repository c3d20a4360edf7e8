"""Draw docs/snr_weights.png: each rule's weight against log-SNR, as it multiplies the error of each target.

Run ``python docs/plot_snr_weights.py [FILE]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch

from lit_efficient import snr_weight
from lit_efficient.losses.snr import GAMMAS, RULES

NAMES = {"min_snr": "Min-SNR", "soft_min_snr": "soft Min-SNR", "p2": "P2", "debiased": "debiased"}
NAMES["truncated"] = "truncated SNR"
COLORS = dict(zip(RULES, ("#0072b2", "#56b4e9", "#d55e00", "#009e73", "#cc79a7")))  # for the colour-blind, too
TARGETS = {
    "x0": "error in x₀",
    "eps": "error in ε  (÷ SNR)",
    "v": "error in v  (÷ (SNR + 1))",
    "flow": "error in the flow  (· σ²)",
}


def main(path: Path) -> None:
    """Draw the picture into ``path``."""
    log_snr = torch.linspace(-10, 10, 401, dtype=torch.float64)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 4, figsize=(13, 4.3), sharex=True, sharey=True)
    for axis, (target, title) in zip(axes, TARGETS.items()):
        for rule in RULES:
            gamma = f" (γ = {GAMMAS[rule]:g})" if rule in GAMMAS else ""
            style = "--" if rule == "soft_min_snr" else "-"
            weight = snr_weight(log_snr, rule, prediction=target)
            axis.plot(log_snr, weight, style, color=COLORS[rule], linewidth=2, label=NAMES[rule] + gamma)
        axis.axhline(1, color="0.75", linewidth=0.8, zorder=0)
        axis.set(yscale="log", ylim=(1e-3, 1e3), xlim=(-10, 10), title=title)
        axis.grid(axis="x", color="0.92")
        axis.set_xlabel("← noise      log SNR      clean →")
    axes[0].set_ylabel("weight of a sample's squared error")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(RULES), frameon=False)
    figure.suptitle("One weight for x₀, converted to what the network predicts: the gradients stay the same")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("snr_weights.png"))
