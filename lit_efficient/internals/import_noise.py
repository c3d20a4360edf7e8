"""Log records of torchao and torch during the import of torchao, which peft imports, too. No user can act on them.

torchao logs the reason for each compiled library that it cannot load (they are for other GPUs and Python versions).
torch logs that torchao's way of registering enums is outdated. Checked with torchao 0.18 and torch 2.13.
"""

import logging

NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": " is now natively supported by torch.compile"}
"""Loggers, and a text in the records that are dropped."""


def silence_imports() -> None:
    """Drop these records, and no others, from now on."""
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
