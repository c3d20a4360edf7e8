import pytest
import torch
from torch import nn

from tests.internals.leaning import leans_on


@leans_on("torch", "nn.Module._compiled_call_impl", "torch_compiler")
def test_a_module_knows_that_it_is_compiled():
    from lit_efficient.internals.torch_compiler import is_compiled

    layer = nn.Linear(1, 1)
    assert not is_compiled(layer)
    layer.compile(backend="eager")
    assert is_compiled(layer)


@leans_on("torch", "torch._functorch.config", "torch_compiler")
def test_the_compiler_has_both_settings():
    from lit_efficient.internals.torch_compiler import swap_setting

    for name, ours, default in (("donated_buffer", False, True), ("activation_memory_budget", 0.5, 1.0)):
        before = swap_setting(name, ours)
        assert swap_setting(name, before) == ours
        assert swap_setting(name, before) == before == default


@leans_on("torch", "torch._dynamo.utils.graph_break_reasons and torch._dynamo.exc.Unsupported", "torch_compiler")
def test_breaks_and_refusals_say_file_line_and_reason():
    from lit_efficient.internals.torch_compiler import breaks, refused

    def branches(x):
        return x + 1 if x.sum() > 0 else x

    line = f"{__file__}:{branches.__code__.co_firstlineno + 1}"
    before = breaks()
    torch.compile(branches, backend="eager")(torch.ones(3))
    assert list((breaks() - before).items()) == [((line, "Data-dependent branching"), 1)]
    with pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: x + 1 if x.sum() > 0 else x, backend="eager", fullgraph=True)(torch.ones(3))
    place, reason = refused(raised.value)
    assert place.startswith(f"{__file__}:")
    assert reason.startswith("Data-dependent branching")
    assert refused(ValueError()) is None


@leans_on("torch", "torch._dynamo.utils.counters", "torch_compiler")
def test_graphs_and_functions_are_counted():
    from lit_efficient.internals.torch_compiler import counts

    def gained(x):
        before = counts()
        function(x)
        return tuple(now - then for now, then in zip(counts(), before, strict=True))

    function = torch.compile(lambda x: x + 1, backend="eager")
    assert gained(torch.ones(3)) == (1, 1, 1)
    assert gained(torch.ones(3)) == (0, 0, 0)
    assert gained(torch.ones(3, 3)) == (1, 1, 1)


@leans_on("torch", "torch._dynamo.eval_frame._stance", "torch_compiler")
def test_it_is_known_that_nothing_is_compiled_for_now():
    from lit_efficient.internals.torch_compiler import runs_eagerly

    assert not runs_eagerly()
    with torch.compiler.set_stance("force_eager"):
        assert runs_eagerly()
    assert not runs_eagerly()


@leans_on("torch", "torch._dynamo.eval_frame.OptimizedModule", "torch_compiler")
def test_a_wrapper_that_compiles_is_known():
    from lit_efficient.internals.torch_compiler import wraps_compiled

    layer = nn.Linear(1, 1)
    assert wraps_compiled(torch.compile(layer, backend="eager"))
    assert not wraps_compiled(layer)


@leans_on("torch", "torch._inductor.config", "torch_compiler")
def test_compiled_code_can_draw_as_it_does_uncompiled():
    from torch._inductor import config

    from lit_efficient.internals.torch_compiler import draws_as_uncompiled

    assert not config.fallback_random
    with draws_as_uncompiled():
        assert config.fallback_random
    assert not config.fallback_random
