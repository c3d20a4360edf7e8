"""Log records of libraries, most of them during imports. No user can act on them.

torchao logs the reason for each compiled library that it cannot load (they are for other GPUs and Python versions).
torch logs that torchao's way of registering enums is outdated. bitsandbytes logs that a kernel of a hub is missing on
processors with AVX512-BF16; it has its own. bitsandbytes logs that its 8-bit layers compute in float16, which their
config has asked for. transformers logs that it takes processors of images without torchvision, as pipelines of
diffusers import them. diffusers logs that torchao lacks classes of earlier versions. Checked with torchao 0.18, torch
2.13, bitsandbytes 0.50, transformers 5.23 and diffusers 0.42.
"""

import logging

NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": " is now natively supported by torch.compile",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast from ",
    "transformers.utils.import_utils": " requires torchvision (not installed); falling back to ",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects.",
}
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
