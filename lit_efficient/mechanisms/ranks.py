"""This process among those that train together."""

from typing import Any

from torch import distributed


def place_among_ranks() -> tuple[int, int]:
    """This process's number, and how many there are; (0, 1) where no group has been formed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gather_objects(value: Any) -> list[Any]:
    """Each process's value, in all of them."""
    _, size = place_among_ranks()
    found = [value] * size
    if size > 1:
        distributed.all_gather_object(found, value)
    return found
