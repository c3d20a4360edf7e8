"""What torchao and torch log while torchao is imported, which peft does, too: nothing that a user could mend.

torchao says of each compiled library that it cannot load why not (they are for GPUs and Python versions that are not
there), and torch calls torchao's way of registering enums outdated. Checked with torchao 0.18 and torch 2.13.
"""

import logging

NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": " is now natively supported by torch.compile"}
"""Loggers, and what the records that are left out contain."""


def silence_imports() -> None:
    """Leave these records out, and no others, from now on."""
    for name, text in NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Without) for one in logger.filters):
            logger.addFilter(_Without(text))


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
