"""Sharded training (FSDP2): each of N processes holds 1/N of weights, gradients and optimizer states.

    before a block's forward and backward:  its weights are gathered from all processes, and freed after it
    after its backward:                     its gradients are averaged, and each process keeps its own part
    units:                                  each repeated block, embeddings, output heads, and the rest of the module

Saves: (N - 1) / N of the memory of weights, gradients and optimizer states in each process
Costs: each step receives the weights twice and sends the gradients once: 1.5 times the communication of data
parallelism
Source: Zhao et al. (2023), https://arxiv.org/abs/2304.11277; torch.distributed.fsdp.fully_shard
"""

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import Optimizer

from lit_efficient.declaration import overrides, techniques_of
from lit_efficient.distributed.expert_parallel import check_experts, divide_experts
from lit_efficient.distributed.ranks import check_batches
from lit_efficient.distributed.row_slices import ROW_AMOUNT, own_slices, share_rows
from lit_efficient.distributed.shards import (
    TIED,
    asking_for,
    check_everywhere,
    check_surplus,
    checkpoint_keys,
    local_copy,
    staged,
    states_in,
    training_only_keys,
    write_shards,
)
from lit_efficient.distributed.tensor_parallel import Parallel, clip_by_norm, parallelize, plan_of, same_draws
from lit_efficient.distributed.units import (
    Sharded,
    ends_of,
    float32_parts,
    gather_when_called,
    owns_its_parameters,
    same_everywhere,
)
from lit_efficient.distributed.weight_slices import fill_waiting
from lit_efficient.errors import CheckpointError, ChecksTypes, ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.files.checkpoints import Checkpoint, load_verified
from lit_efficient.files.remote import is_remote
from lit_efficient.internals.lightning_loops import BEFORE_TRANSFER
from lit_efficient.internals.lightning_sharding import ShardingBase, configure_model
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.torch_fsdp import make_root, never_gathered, sharded_modules
from lit_efficient.internals.torch_optimizers import without_step_hooks
from lit_efficient.internals.torch_tensors import gradient_hooks
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method, wrapped
from lit_efficient.mechanisms.adapters.base import has_frozen_base, noting_digests
from lit_efficient.mechanisms.adapters.sharded_restore import check_adapters
from lit_efficient.mechanisms.averages.weights import placed_like
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.metering import measure
from lit_efficient.surgery import count, is_sharded, reshard
from lit_efficient.traits import Trait

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BF16_MIXED = "bf16-mixed"
_ALONE = Parallel()
_ADVICE = "Continue with the optimizer that wrote it, or from its weights only: restore(module, path)"


class ShardedStrategy(ChecksTypes, ShardingBase):
    """Shard any LightningModule over all processes, after all techniques have changed it.

    Repeated blocks are found as in `StochasticDepth` and `ActivationCheckpointing`. Weights that several units share
    are gathered with the rest of the module. All processes start with the weights of process 0. A module that shards
    itself in ``configure_model`` is left unchanged. Gradients are clipped by the norm over all shards.

    Args:
        blocks: ``auto``, or regular expressions for the dotted names of the modules that are gathered one at a time.
        reshard_after_forward: Free a block's weights after its forward pass and gather them again for its backward
            pass; false keeps them in between: less communication, more memory. A number: keep them in shards among that
            many processes, such as those of a node.
        replicas: Copies of the model, at least 1, each sharded over world size / ``replicas`` processes (hybrid
            sharding: weights are gathered over the fast network of a node, and only gradients cross the slow one).
        offload: Keep shards, gradients and optimizer states in CPU memory, where the optimizer steps.
        gather_dtype: Format in which weights are gathered and used: ``auto`` is bfloat16 under ``precision:
            bf16-mixed``, else the stored format.
        reduce_dtype: Format in which gradients are averaged.
        parallel: Processes that share each layer, or each row of tokens; all processes shard.
        reduce_each_batch: Average gradients after each batch of an accumulation window, too. Otherwise they are sent
            once per window, and each process holds whole gradients until then.
        save_distributed_checkpoint: Each process writes its shards into a folder; false: process 0 gathers all and
            writes one file.
        timeout: Maximum time that processes wait for each other.

    Raises:
        ConfigurationError: For an argument out of range; for a module without blocks, with a parameter that is a
            scalar, or with trained weights of several formats in one block.
        ConflictError: With ``precision: 16-mixed``, whose loss scaling does not support shards here.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "1/N of weights, gradients and states in each of N processes")
    }
    shards_itself = True  # parameters that are not sharded yet when techniques are applied are no error
    writes_sums = True
    saves_in_background = True

    @property
    def reads_slices(self) -> bool:
        """Return whether networks may be built without weights, so that each process reads its own slices later."""
        return self.parallel.tensor == 1

    def __init__(
        self,
        blocks: str | list[str] = "auto",
        reshard_after_forward: bool | int = True,
        replicas: int = 1,
        offload: bool = False,
        gather_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        parallel: Parallel = _ALONE,
        reduce_each_batch: bool = False,
        save_distributed_checkpoint: bool = True,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        who = type(self).__name__
        check_number(who, "replicas", replicas, least=1, whole=True)
        if replicas > 1 < parallel.tensor:
            raise refusal(who, "replicas", "1 with parallel.tensor above 1", replicas)
        if parallel.experts and (replicas > 1 or offload):
            raise refusal(who, "parallel.experts", "false with replicas above 1 or offload", True)
        if not isinstance(reshard_after_forward, bool):
            check_number(who, "reshard_after_forward", reshard_after_forward, least=2, whole=True)
        if not blocks:
            raise refusal(who, "blocks", "auto or patterns", blocks)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend="cpu:gloo,cuda:nccl" if offload else None,
            timeout=timeout,
        )
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.replicas = replicas
        self.offload = offload
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.parallel = parallel
        self.reduce_each_batch = reduce_each_batch
        self._writers: Any = None  # process group of the threads that write checkpoints
        self._mesh: Any = None  # device mesh over which parameters are sharded

    # Processes -------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        world = self.num_nodes * self.num_processes
        self._check_sizes(world)
        self.fix_sizes(self.parallel.tensor)
        super().setup_environment()
        self._mesh = self.device_mesh["data_parallel"]
        kind = self.root_device.type
        if self.replicas > 1:
            shape = (self.replicas, world // self.replicas)
            self._mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        context = self.parallel.context
        if context > 1:
            mesh = init_device_mesh(kind, (world // context, context), mesh_dim_names=("rows", "slices"))
            share_rows(mesh["slices"].get_group())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, object]:
        shared = self.parallel.tensor * self.parallel.context  # processes that share a row read the same rows
        return {"num_replicas": self.world_size // shared, "rank": self.global_rank // shared}

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        if self.parallel.context > 1:
            check_slices(module, trainer)
            wrap_method(module, BEFORE_TRANSFER, _cut)
        self.model = self.precision_plugin.convert_module(module)
        if not any(map(is_sharded, module.parameters())):
            rank_zero_info(f"ShardedStrategy: {self._shard(module)}")
            if hasattr(module, "on_sharded"):  # called before a checkpoint is read
                module.on_sharded()
        with wrapped(module, configure_model, "configure_model"):
            super().setup(trainer)
        if sharded_modules(module)[:1] == [module]:
            make_root(module)
        self._has_stepped_back = False

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if not self._has_stepped_back:
            # torch fails for a unit that has never been gathered, which a batch of the first window may not run.
            for part in never_gathered(self.lightning_module):
                part.unshard()
                part.reshard()
            self._has_stepped_back = True

    def teardown(self) -> None:
        share_rows(None)
        if self.lightning_module is not None:
            unwrap_method(self.lightning_module, BEFORE_TRANSFER, _cut)
        super().teardown()

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def model_to_device(self) -> None:
        if not self.offload:  # offloaded shards are on the CPU, and stay there
            super().model_to_device()

    # The network -----------------------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> str:
        """Shard ``module`` in place and return a description."""
        found, units, heads = self._units(module)
        wide = float32_parts(module, units, self._policy().param_dtype not in (None, torch.float32))
        check_formats(module, units, wide)
        for p in [p for p in module.parameters() if not p.is_contiguous()]:
            p.data = p.data.contiguous()  # torch does not shard channels-last and other strided parameters
        same_everywhere(module, self.root_device)
        divided = self._divide(module)
        how: dict[str, Any] = {"mesh": self._mesh, "mp_policy": self._policy(), "offload_policy": self._offload()}
        if self.parallel.experts:
            how["ignored_params"] = divide_experts(module, self._mesh)
            divided += f"; {count(how['ignored_params']):,} parameters are of experts, to which tokens are sent"
        for together in wide:
            exact = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(together, reshard_after_forward=self.reshard_after_forward, **how | {"mp_policy": exact})
        for unit in units:
            # A head's backward pass follows right after its forward pass: its weights stay gathered.
            reshards = self.reshard_after_forward
            if any(unit is head for head in heads):
                reshards = False
            fully_shard(unit, reshard_after_forward=reshards, **how)
        rest = count(module.parameters()) - count(p for unit in units for p in unit.parameters())
        fully_shard(module, reshard_after_forward=False, **how)
        fill_waiting(module, torch.device("cpu") if self.offload else self.root_device, noting_digests(module))
        gather_when_called(module, units)
        inside = {id(part) for unit in units for part in unit.modules()}
        for part in (together[0] for together in wide if id(together[0]) not in inside):
            # Networks read weights of the rest outside of its parts' forward passes.
            module.register_forward_pre_hook(partial(_gather, part))
        blocks = sum(any(unit is block for block in found) for unit in units)
        total = count(module.parameters())
        kinds = ", ".join(sorted({type(unit).__name__.removeprefix("FSDP") for unit in units[:blocks]}))
        return (
            f"{total:,} parameters in {self._mesh.size() // self.replicas} shards: {blocks} blocks ({kinds or 'none'})"
            f", {len(units) - blocks} embeddings and heads, and {rest:,} other parameters"
            + (f"; {self.replicas} replicas" if self.replicas > 1 else "")
            + divided
        )

    def shard_frozen(self, network: nn.Module) -> None:
        """Shard the blocks of a frozen network outside of the module, which all processes call together.

        Modules outside of blocks stay whole. So do blocks of quantised codes, whose scales would not be sharded with
        them. Weights that wait are read.
        """
        blocks: list[nn.Module] = []
        with contextlib.suppress(ConfigurationError):
            blocks = [block for _, block in find_blocks(network, who="ShardedStrategy", every=True)]
        for block in blocks:
            if all(type(p) is nn.Parameter and p.is_floating_point() for p in block.parameters()):
                fully_shard(block, mesh=self._mesh, reshard_after_forward=True, offload_policy=self._offload())
        if fill_waiting(network, torch.device("cpu") if self.offload else self.root_device):
            for tensor in (*network.parameters(), *network.buffers()):
                if not is_sharded(tensor):
                    tensor.data = tensor.data.to(self.root_device)
        for block in sharded_modules(network):
            make_root(block)  # at once, because torch would take a later copy of the block for a part of it

    def _divide(self, module: nn.Module) -> str:
        """Divide the layers of the network's plan among processes and return a description."""
        if self.parallel.tensor == 1:
            return ""
        mesh = self.device_mesh["tensor_parallel"]
        layers = parallelize(module, mesh)
        same_draws(mesh)
        wrap_method(self.precision_plugin, "clip_grad_by_norm", clip_by_norm)
        return f"; {layers} layers are each shared by {self.parallel.tensor} processes"

    def check_network(self, module: nn.Module, world: int) -> None:
        """Refuse a network that ``world`` processes could not shard, if there is one already.

        Raises:
            ConfigurationError: As when it is sharded.
            ConflictError: For a layer of the plan that a technique has changed.
        """
        self._check_sizes(world)
        self._units(module)
        if self.parallel.tensor > 1:
            plan_of(module, self.parallel.tensor)
        if self.parallel.context > 1:
            check_slices(module, trainer_of(module))
        if self.parallel.experts:
            check_experts(module, world)

    def _check_sizes(self, world: int) -> None:
        sizes = {"parallel.tensor": self.parallel.tensor, "parallel.context": self.parallel.context}
        for name, size in {**sizes, "replicas": self.replicas}.items():
            if world % size:
                raise refusal("ShardedStrategy", name, f"a divisor of the world size ({world})", size)
        shards = world // (self.replicas * self.parallel.tensor)
        kept = self.reshard_after_forward
        if shards % (int(kept) or 1):
            raise refusal("ShardedStrategy", "reshard_after_forward", f"a divisor of the shards ({shards})", kept)

    def _units(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
        """Return the blocks, the units that are gathered one at a time, and the heads among the units."""
        named = module.named_parameters()
        scalar = next((name for name, p in named if p.ndim == 0 or (p.requires_grad and not p.numel())), None)
        if scalar is not None:
            raise ConfigurationError(
                f"ShardedStrategy: {scalar!r} is a scalar, or empty, and cannot be sharded: make it a tensor of one "
                "element"
            )
        hooked = next((name for name, p in module.named_parameters() if gradient_hooks(p)), None)
        if hooked is not None:
            raise ConfigurationError(
                f"ShardedStrategy: a hook on the gradient of {hooked!r} would be lost, because a shard replaces "
                "the parameter: use strategy='ddp', or register it in on_fit_start, where it receives shards"
            )
        found = [block for _, block in find_blocks(module, self.blocks, who="ShardedStrategy", every=True)]
        ends, heads = ends_of(module, found)
        units = [unit for unit in (*found, *ends) if owns_its_parameters(unit, module)]
        if not units:
            raise ConfigurationError(
                f"ShardedStrategy: the {len(found)} blocks of {type(module).__name__} have no parameters of their own, "
                r"or share some: name others with blocks=['layers\.\d+'], for example, or use strategy='ddp'"
            )
        return found, units, heads

    def _policy(self) -> MixedPrecisionPolicy:
        precision = str(self.precision_plugin.precision)
        if precision.startswith("16-mixed"):
            raise ConflictError(
                "ShardedStrategy: precision='16-mixed' scales the loss by a plugin that does not support shards: use "
                "bf16-mixed"
            )
        wanted: str = self.gather_dtype
        if wanted == "auto" and precision == _BF16_MIXED:
            wanted = "bfloat16"
        # Inputs are not cast here, because the precision plugin's autocast does it.
        return MixedPrecisionPolicy(_DTYPES.get(wanted), _DTYPES[self.reduce_dtype], cast_forward_inputs=False)

    def _offload(self) -> OffloadPolicy:
        if self.offload:
            return CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        return OffloadPolicy()

    def on_train_start(self) -> None:
        check_batches(self._module.trainer)

    # A step ----------------------------------------------------------------------------------------------------------

    def _step(self, kind: str, name: str, *args: object, **kwargs: object) -> Any:
        module = self.lightning_module
        with getattr(self.precision_plugin, f"{kind}_step_context")():
            if isinstance(module, FSDPModule):
                return self.run_as_forward(module, name, *args, **kwargs)
            return getattr(module, name)(*args, **kwargs)

    training_step = partialmethod(_step, "train", "training_step")
    validation_step = partialmethod(_step, "val", "validation_step")
    test_step = partialmethod(_step, "test", "test_step")
    predict_step = partialmethod(_step, "predict", "predict_step")

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local in all but the last batch of an accumulation window."""
        parts = [] if self.reduce_each_batch else sharded_modules(self._module)
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            stepped = super().optimizer_step(optimizer, *args, **kwargs)
        except RuntimeError as error:
            if "Sharding propagation failed" not in str(error):
                raise
            raise ConflictError(
                f"ShardedStrategy: a step of {type(optimizer).__name__} uses an operation without support for shards: "
                "use an optimizer that does (GroupedAdafactor for Adafactor), or strategy='ddp'"
            ) from error
        reshard(self._module)  # hooks may have gathered weights, which the step has made outdated
        return stepped

    def on_validation_start(self) -> None:
        reshard(self._module)  # a callback may have replaced the shards, by averaged weights for example

    on_validation_end = on_test_start = on_test_end = on_predict_start = on_predict_end = on_validation_start

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Checkpoint, filepath: Any, storage_options: object = None) -> None:
        if not self.in_shards or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = super().save_checkpoint
        firsts: dict[int, str] = {}
        checkpoint[TIED] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if name in checkpoint["state_dict"] and firsts.setdefault(id(p), name) != name:
                checkpoint[TIED][name] = firsts[id(p)]
        jobs = getattr(self.checkpoint_io, "jobs", None)
        if jobs is None and is_remote(filepath):
            # Lightning writes the shards of all processes into a folder of process 0, which may run elsewhere.
            write_shards(self, filepath, staged(checkpoint, None, copy=False))
            return
        if jobs is None:
            write_shards(self, filepath, lambda folder: save(checkpoint, folder))
            return
        jobs.wait()
        if self._writers is None:
            self._writers = distributed.new_group(backend="gloo")
        write_shards(self, filepath, staged(checkpoint, self._writers), jobs, self._writers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with local_copy(self, checkpoint_path) as path:
            return self._load(path)

    def _load(self, path: Path) -> dict[str, Any]:
        module = self._module
        check_everywhere(self, path)
        aside = training_only_keys(path)
        present: set[str] = set()
        if aside or path.is_dir():
            present = checkpoint_keys(path)
        if path.is_dir():
            check_surplus(module, present - aside, path)
        if aside and not has_frozen_base(module):
            check_adapters(module, {*present, *aside & module.state_dict().keys()}, path)
        with asking_for(module, present) if aside else nullcontext():
            if path.is_file():
                return load_file(path, module, self.optimizers)
            with contextlib.ExitStack() as stack:
                for i, optimizer in enumerate(self.optimizers):
                    stack.enter_context(expecting(optimizer, module, states_in(path, i)))
                try:
                    return super().load_checkpoint(path, True)
                except CheckpointException as error:
                    first = next(iter(error.failures.values()))[0]
                    raise CheckpointError(
                        f"{path} does not fit module or optimizer: {str(first).rstrip('.')}. {_ADVICE}"
                    ) from error


@contextmanager
def expecting(optimizer: Any, module: nn.Module, named: Collection[str]) -> Iterator[None]:
    """Make torch ask a folder for the states of these parameters only, in the place of all that train."""
    names = {id(p): name for name, p in module.named_parameters()}
    before = [(p, p.requires_grad) for group in optimizer.param_groups for p in group["params"]]
    for p, _ in before:
        p.requires_grad_(names.get(id(p)) in named)
    if hasattr(optimizer, "moved_weights"):  # ScheduleFree refuses a step in eval mode, and torch steps to make states
        optimizer.train()
    try:
        with without_step_hooks(optimizer):  # techniques must not act on torch's step
            yield
    finally:
        for p, trains in before:
            p.requires_grad_(trains)


def load_file(path: Path, module: LightningModule, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Fill shards from a checkpoint in one file, written by any strategy, and return the rest of the checkpoint.

    Raises:
        CheckpointError: If weights or states do not fit.
    """
    checkpoint = load_verified(path, verify=False, mapped=True)
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"{path} is not a checkpoint of Lightning: load its weights into the module, without ckpt_path"
        )
    saved = checkpoint.pop("state_dict")
    own = module.state_dict()
    missing = [name for name in own if name not in saved]
    if missing and module.strict_loading:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of the module: {', '.join(missing[:3])}")
    check_surplus(module, saved, path)
    found = {}
    for name in own:  # the same order in all processes, which place each tensor together
        if name in saved:
            found[name] = _placed(saved[name], own[name], f"{path}: {name!r}")
    module.load_state_dict(found, strict=False)
    states = checkpoint.get("optimizer_states", [])
    for optimizer, state in zip(optimizers, states, strict=False):
        given = [[*group["params"]] for group in optimizer.param_groups]
        kept = [[*group["params"]] for group in state["param_groups"]]
        sizes = [[*map(len, groups)] for groups in (kept, given)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"{path}: its optimizer has groups of {sizes[0]} parameters, and this optimizer has groups "
                f"of {sizes[1]}. {_ADVICE}"
            )
        like = dict(zip(chain(*kept), chain(*given), strict=True))
        sharded = {}
        for key, values in state["state"].items():
            sharded[key] = {name: _state_of(like[key], value) for name, value in values.items()}
        needed = optimizer.param_groups[0].keys()
        optimizer.load_state_dict({**state, "state": sharded})
        lacking = sorted(needed - optimizer.param_groups[0].keys() & optimizer.defaults.keys())
        if lacking:
            raise CheckpointError(f"{path}: its optimizer has no {lacking[0]!r}, which this one needs. {_ADVICE}")
    return checkpoint


def _state_of(parameter: Any, value: object) -> Any:
    """Return a state sharded like its parameter. A dimension in which the state is smaller, such as one row, stays
    whole.
    """
    if not isinstance(value, Tensor) or not value.ndim == parameter.ndim > 0 or not is_sharded(parameter):
        return value
    differs = [n for n, (own, of) in enumerate(zip(value.shape, parameter.shape)) if own != of]
    kinds = [Replicate() if kind.is_shard() and kind.dim in differs else kind for kind in parameter.placements]
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, kinds)


def _placed(tensor: Tensor, like: Any, what: str) -> Tensor:
    if tensor.shape != like.shape:
        raise CheckpointError(f"{what} is {list(tensor.shape)}, and {list(like.shape)} in the module")
    return placed_like(tensor, like, tensor.dtype)


def _cut(self: Any, batch: object, *args: object, **kwargs: object) -> Any:
    """Return this process's slices of a batch, on the host, after hooks have had the whole batch and before it is
    counted.
    """
    batch = inner_method(self, BEFORE_TRANSFER, _cut)(batch, *args, **kwargs)
    if self.trainer.predicting:
        return batch
    return own_slices(batch) | {ROW_AMOUNT: measure(batch)[0] / self.trainer.strategy.parallel.context}


def _gather(part: Sharded, *_: object) -> None:
    part.unshard()


def check_slices(module: nn.Module, trainer: Trainer | None) -> None:
    """Refuse a module, or a technique of its trainer, that needs whole rows.

    Raises:
        ConflictError: With the reason.
    """
    if not getattr(module, "takes_slices", False):
        raise ConflictError(
            f"ShardedStrategy: {type(module).__name__} does not declare that it trains on slices of rows "
            "(takes_slices): set parallel.context to 1"
        )
    if trainer is None:
        return
    for one in techniques_of(trainer):
        why = one.reasons.get(Trait.NEEDS_WHOLE_ROWS) or one.reasons.get(Trait.NEEDS_WHOLE_BATCH)
        if not why and overrides(one, "sample_weights"):
            why = "it weights the losses of whole rows"
        if why:
            raise ConflictError(
                f"ShardedStrategy: rows are divided among processes, and {type(one).__name__} cannot work on "
                f"slices: {why}"
            )


def check_formats(module: nn.Module, units: list[nn.Module], wide: list[list[nn.Module]]) -> None:
    """Refuse trained parameters of several formats that are gathered together, in a unit or in the rest of the
    module.
    """
    apart = {id(p) for together in wide for part in together for p in part.parameters()}
    inside = {id(p) for unit in units for p in unit.parameters()}
    parts = [(f"{type(unit).__name__}, a unit,", [*unit.parameters()]) for unit in units]
    parts.append(("the rest of the module", [p for p in module.parameters() if id(p) not in inside]))
    for what, parameters in parts:
        trained = [p for p in parameters if p.requires_grad and id(p) not in apart]
        formats = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
        if len(formats) > 1:
            raise ConfigurationError(
                f"ShardedStrategy: the trained parameters of {what} have the dtypes {' and '.join(formats)}, but "
                "parameters that are gathered together need one dtype. Train them in one dtype, or name smaller units "
                "with blocks="
            )
