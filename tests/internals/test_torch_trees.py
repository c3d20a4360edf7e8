import pytest

from tests.internals.leaning import leans_on

TREE = {"a": [1, (2.0, "three")]}


@leans_on("torch", "torch.utils._pytree", "torch_trees")
def test_containers_are_walked_and_anything_else_is_a_leaf():
    from lit_efficient.internals import torch_trees

    assert torch_trees.tree_leaves(TREE) == [1, 2.0, "three"]
    assert torch_trees.tree_map(lambda leaf: [leaf], TREE) == {"a": [[1], ([2.0], ["three"])]}
    assert torch_trees.tree_map(lambda a, b: a + b, [1, (2,)], [10, (20,)]) == [11, (22,)]
    assert torch_trees.tree_map_only(float, str, TREE) == {"a": [1, ("2.0", "three")]}


def test_a_name_that_is_gone_is_one_sentence():
    @leans_on("torch", "torch.utils._gone", "torch_trees")
    def test():
        from torch.utils import _gone  # noqa: F401

    with pytest.raises(pytest.fail.Exception) as caught:
        test()
    said = str(caught.value)
    assert said.startswith("torch 2.")
    assert "has no torch.utils._gone as we use it" in said
    assert "mend lit_efficient/internals/torch_trees.py (ImportError: cannot import name" in said
    assert "\n" not in said
