"""PeftAdapter: peft's own numbers for every method that it puts into a network, resume, folders, mixing, refusals."""

from __future__ import annotations

from lit_efficient import PeftAdapter
from lit_efficient.testing import Run
from tests.contract import effects
from tests.contract.row import Row

LOKR = {"peft_type": "LOKR", "r": 2, "alpha": 4, "target_modules": ["up", "down"]}


LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["up", "down"]}


def _trains_the_adapter_alone(run: Run) -> None:
    effects.assert_base_is_frozen(run, r"\.(?:lokr_w\w+\.default|lora_B\.default\.weight)$")


ROW = Row(
    lambda: PeftAdapter(LOKR),
    _trains_the_adapter_alone,
    beside={"QuantizeBase": lambda: PeftAdapter(LORA)},  # peft's LoKr cannot read quantised weights
)
