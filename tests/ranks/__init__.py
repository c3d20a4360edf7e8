"""What each rank of a distributed run does: functions for ``tests.processes.run_ranks``."""
