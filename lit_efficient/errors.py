"""Every error that this package raises on purpose, as one small tree.

    LitEfficientError
    ├── ConfigurationError   an argument, file or combination that cannot work; also a ValueError
    │   └── ConflictError    two techniques that exclude each other, or a requirement that is not met
    ├── CheckpointError      a checkpoint that cannot be written, read or trusted
    └── OutOfMemoryError     a step that needs more memory than there is, or than it may take

The command line prints any of them without a traceback and exits with code 2.
"""


class LitEfficientError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(LitEfficientError, ValueError):
    """An argument, file or combination that cannot work. The message names it, what is allowed and the value given."""


class ConflictError(ConfigurationError):
    """Two techniques that exclude each other, or a requirement that is not met. The message names the way out."""


class CheckpointError(LitEfficientError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted. The message names the file."""


class OutOfMemoryError(LitEfficientError, RuntimeError):
    """A step that needs more memory than there is, or than it may take. The message gives both in bytes."""
