"""Subcommands of ``python -m lit_efficient`` that are not Lightning's: each file has ``run(argv) -> exit code``.

``argv`` is what follows the subcommand's name. Errors are raised: the caller prints those that the user can mend.
"""
