"""The run of a command line: the config is checked by jsonargparse, its parts are built, and Lightning runs them."""

import contextlib
import os
import shlex
import signal
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed import is_torchelastic_launched
from torch.optim import Optimizer

from lit_efficient.application.settings import ValidationAdvice
from lit_efficient.cli import checkpoint, optimizers, preflight
from lit_efficient.cli.advice import MemoryAdvice, SizesAdvice
from lit_efficient.cli.arguments import Command, read_command
from lit_efficient.cli.defaults import (
    BeginWandb,
    CheckSharding,
    SaveRunConfig,
    add_default_parts,
    callbacks_of,
    prefetch,
    quiet,
    setup_environment,
)
from lit_efficient.cli.errors import constructor_error, exit_code, explain, parsing_error
from lit_efficient.cli.mixed_copies import MixedPrecisionAdvice
from lit_efficient.cli.names import check_classes
from lit_efficient.cli.next_steps import COMMAND, announced, last_saved, last_word, next_steps, short
from lit_efficient.cli.parsing import PARSER_MODE, Parser, help_option, set_import_policy
from lit_efficient.cli.rehearsal import rehearse
from lit_efficient.cli.resumed import ConfigWins
from lit_efficient.cli.run_events import RunEvents
from lit_efficient.cli.run_folder import RunFolder, candidates, keep_rows, place_loggers
from lit_efficient.cli.run_log import RunLog
from lit_efficient.cli.secrets import hide_words, masked, masking, print_error, redacted, remember
from lit_efficient.cli.signals import ends_on_sigterm, ignore_warnings_of_the_end
from lit_efficient.cli.tree import ConfigText, Table
from lit_efficient.errors import ConfigurationError, ConflictError, DivergedError
from lit_efficient.files.checkpoints import Checkpoint, state_of
from lit_efficient.files.remote import is_remote
from lit_efficient.files.runs import real
from lit_efficient.internals.jsonargparse_parser import spelt_for, subcommands
from lit_efficient.internals.lightning_cli import OpenCLI
from lit_efficient.internals.lightning_comet import comet_begins_late
from lit_efficient.internals.lightning_hooks import skip_empty_hooks
from lit_efficient.internals.lightning_strategies import pickles
from lit_efficient.internals.lightning_wandb import begin_late
from lit_efficient.internals.wraps import wrap_method
from lit_efficient.mechanisms.tensor_cores import auto_precision
from lit_efficient.traits import Trait, has_trait


class LitEfficientCLI(OpenCLI):
    """Lightning's command line for any LightningModule and LightningDataModule. A script may use it, too.

    The methods are in the order in which they run.

    Args:
        allow_imports: Packages whose classes configs may name, besides the trusted ones and ``--allow-import``.
        quiet: Show errors, warnings and the last lines alone.
        command: The command line, if its names are checked already.
        kwargs: As for :class:`~lightning.pytorch.cli.LightningCLI`.

    Raises:
        LitEfficientError: For bad input, before data is touched.
    """

    tried_optimizer: Optimizer | None = None  # the config's optimizer over a temporary parameter
    folder: RunFolder | None = None  # of a fit
    events: RunEvents | None = None
    devices_are_here = True  # false for a run on another machine
    _chosen_precision: str | None = None  # in the place of `auto`

    def __init__(
        self,
        *args: Any,
        allow_imports: Sequence[str] = (),
        quiet: bool = False,
        command: Command | None = None,
        **kwargs: Any,
    ) -> None:
        self.allowed = list(allow_imports)
        self._command = command
        kwargs.setdefault("save_config_callback", SaveRunConfig)
        kwargs.setdefault("parser_class", Parser)
        kwargs.setdefault("seed_everything_default", 0)
        parser = {"exit_on_error": False, "allow_abbrev": False, "parser_mode": PARSER_MODE}
        words = kwargs.get("args")
        program = COMMAND
        if words is None:
            words = sys.argv[1:]
            program = f"python {short(sys.argv[0])}"
        typed = list(words) if isinstance(words, list | tuple) else []
        own = kwargs.get("parser_kwargs", {})
        # With options of its own for each subcommand, a parser needs all subcommands.
        self._asked = typed[0] if typed and not own else None
        kwargs["parser_kwargs"] = {**parser, **own}
        self._typed = program, typed
        hides = ""
        if quiet:
            hides = "all" if self._asked == "fit" else "bars"
        self.log = RunLog(hides)
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            self.log.write(explain(error) or traceback.format_exc())
            raise
        finally:
            self.log.stop()
            if self.folder:
                self.folder.discard()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static there
        """Return the subcommand of the first word, or all: the options of each take a tenth of a second to add."""
        known = super().subcommands()
        if self._asked in known:
            return {self._asked: known[self._asked]}
        return known

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Read the command line into one tree, and let jsonargparse check it under the import policy."""
        if isinstance(args, dict | Namespace):
            set_import_policy(self.allowed)
            self.config = parser.parse_object(args)
            return
        command = self._command or read_command(sys.argv[1:] if args is None else args, self._defaults())
        self.allowed += command.packages
        set_import_policy(self.allowed)
        self._choose_precision(command.tree)
        of_subcommand: Any = subcommands(parser).get(command.subcommand or "", parser)
        if command.tree:
            given = ["--config", ConfigText(command.tree)]
        else:
            given = []
        rest = map(help_option, spelt_for(of_subcommand, command.rest))
        try:
            if self._command is None:  # the names of a script's own classes are known to its parser alone
                of_subcommand.check_keys(command.tree)
                command.unlikely = check_classes(command.tree, knows_others=True)
            self.config = parser.parse_args([*filter(None, [command.subcommand]), *given, *rest])
        except ArgumentError as error:
            raise parsing_error(error.message, command.tree, command.unlikely) from error
        self._command = command
        preflight.check_numbers(self.config.get(command.subcommand) or self.config)

    def _choose_precision(self, tree: Table) -> None:
        """Replace ``trainer.precision: auto``, which Lightning does not have, by the precision of the devices here."""
        trainer = tree.get("trainer")
        if not isinstance(trainer, Table) or trainer.get("precision") != "auto":
            return
        chosen = auto_precision(str(trainer.get("accelerator", self.trainer_defaults.get("accelerator", "auto"))))
        trainer = trainer.copy()
        trainer.put("precision", chosen, trainer.places.get("precision"))
        tree.put("trainer", trainer, tree.places.get("trainer"))
        self._chosen_precision = chosen
        rank_zero_info(f"trainer.precision: auto is {chosen} here")

    def _defaults(self) -> Table:
        """Return what a script sets below all configs, as far as a config can take it out or append to it."""
        plugins = self.trainer_defaults.get("plugins")
        if isinstance(plugins, list):
            return Table({"trainer": Table({"plugins": plugins})})
        return Table()

    def before_instantiate_classes(self) -> None:
        """Run all checks that need no parts."""
        self._name_root()
        self._read_interval()
        self.dump_config()
        preflight.check_config(self.config_dump)
        remember(self.config_dump)
        self.config_dump = masked(self.config_dump)  # for records: the parts are built from `self.config`
        for name in dict.fromkeys(self._command.restated if self._command else ()):
            rank_zero_info(f"{name} was given twice: it is used once, and arguments that were given later win")
        if preflight.go_offline_without_key(self.config_dump):
            rank_zero_info("W&B: no API key, so this run is recorded offline; `wandb sync` uploads it later.")
        self._resume()

    def _read_interval(self) -> None:
        """Read a share of an epoch, such as ``--trainer.val_check_interval 0.5``, which the parser takes for a time."""
        trainer = self.part(self.config, "trainer")
        interval = trainer.get("val_check_interval")
        if isinstance(interval, str) and ":" not in interval:
            with contextlib.suppress(ValueError):  # the trainer refuses other texts
                trainer["val_check_interval"] = float(interval)

    def _name_root(self) -> None:
        """Set ``trainer.default_root_dir``, below which runs are written. Unset, it is named after the first config."""
        trainer = self.part(self.config, "trainer")
        configs = self._command.configs if self._command else []
        root = trainer.get("default_root_dir")
        if root is None:
            model = getattr(self.part(self.config, "model"), "class_path", "run")
            if configs:
                name = Path(configs[0]).stem
            else:
                name = model.rpartition(".")[2]
            root = os.path.join("runs", name)
        trainer["default_root_dir"] = os.path.expanduser(root)

    def _resume(self) -> None:
        """Read the checkpoint of ``--ckpt_path``, and compare its config with this one."""
        root = Path(self.part(self.config, "trainer")["default_root_dir"])
        path = self.config_dump.get("ckpt_path")
        fits = self.subcommand == "fit"
        searches = fits and (path in checkpoint.WORDS or path is None)
        self.checkpoint: Checkpoint = {}
        self.changed: dict[str, tuple[Any, Any]] = {}
        tried: list[Path] = []
        if searches:
            tried = candidates(path, root)
        elif path and not is_remote(path):
            tried = [real(Path(path))]
        states = {str(file): state_of(file) for file in tried}  # before they are read
        if searches:
            word = path
            path, self.checkpoint = checkpoint.read_last(tried)
            if word and path is None:
                rank_zero_info(f"ckpt_path: {word}: {root} holds no checkpoint to go on from yet; the run begins anew")
        elif path:
            self.checkpoint = checkpoint.read(path, str(self.subcommand))
            path = str(tried[0]) if tried else path
        self.checked = states.get(path or "")
        if path and os.sep not in path:  # a file may have the name of a word of Lightning's: last, best
            path = os.path.join(os.curdir, path)
        if self.subcommand:
            self.config[self.subcommand]["ckpt_path"] = path
        if path and fits:
            trainer = self.config_dump.get("trainer") or {}
            checkpoint.check_unfinished(str(path), self.checkpoint, trainer.get("max_steps"), trainer.get("max_epochs"))
        if self.checkpoint:
            self.changed = checkpoint.differences(self.checkpoint, self.config_dump, fits)
        if path and fits and self._chosen_precision:
            then = checkpoint.precision_of(str(path), self.checkpoint)
            if then not in (None, self._chosen_precision):
                raise ConfigurationError(
                    f"trainer.precision: auto is {self._chosen_precision} on this machine, but {path} was trained with "
                    f"{then}. Set the precision with which the run shall go on"
                )

    def instantiate_classes(self) -> None:
        """Build data, model and trainer. A ``ValueError`` of a constructor, or a wrong argument, is bad input."""
        self._written = self.config
        self.config = self._placed(self.config)
        try:
            with comet_begins_late():
                super().instantiate_classes()
        except (ValueError, TypeError) as error:
            raise constructor_error(error) from error
        callbacks = callbacks_of(self.trainer)
        if self.subcommand == "fit":
            scheduler = (self.config_dump.get("lr_scheduler") or {}).get("init_args") or {}
            preflight.check_monitors(callbacks, scheduler.get("monitor"), self.model)
        techniques = [c for c in callbacks if getattr(c, "phase", None) is not None]
        if techniques:
            from lit_efficient.declaration import check_conflicts

            # A fit does so, too, but after it has prepared the data.
            check_conflicts([*callbacks, self.datamodule, self.tried_optimizer])
        if self.changed:
            kept = {}
            for callback in callbacks:
                if has_trait(callback, Trait.SEEDS_BATCHES):
                    kept["seed_everything"] = f"{type(callback).__name__} continues with the order and seed from before"
            rank_zero_info(checkpoint.changes_said(str(self.part(self.config, "ckpt_path")), self.changed, kept))
        if self.checkpoint and not techniques:  # techniques may add the tensors of the checkpoint to the model
            checkpoint.check_shapes(self.model, self.checkpoint)
            checkpoint.check_optimizer(self.checkpoint)
        self.checkpoint = {}

    def _placed(self, written: Namespace) -> Namespace:
        """Return the config with the folders of this run. The config that is saved does not have them."""
        config = written.clone()
        trainer = self.part(config, "trainer")
        if self.subcommand is None or trainer.get("fast_dev_run"):
            return config
        root = Path(trainer["default_root_dir"])
        names = None
        if self.subcommand == "fit":
            path = self.part(config, "ckpt_path")
            step = int(self.checkpoint.get("global_step", 0))
            self.folder = RunFolder(root, Path(path) if path else None, checkpoint.is_another_run(self.changed), step)
            names = self.folder.record.get("loggers", [])
            if path:
                verb = "goes on in" if self.folder.goes_on else "starts"
                rank_zero_info(f"ckpt_path: {path} {verb} the run {self.folder.path}")
        if self.folder:
            folder = self.folder.path
        else:
            folder = root / self.subcommand
        trainer["default_root_dir"] = str(folder)
        place_loggers(trainer, folder, names)
        return config

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Build the trainer with the parts that every run gets."""
        quiet()
        self.config = self._written  # it is saved
        if self.devices_are_here:  # after the errors of the config, which are the same on any machine
            asked = self.config_dump.get("trainer") or {}
            preflight.check_devices(asked.get("accelerator", "auto"), asked.get("devices", "auto"))
        optimizer = (self.config_dump.get("optimizer") or {}).get("class_path", "")
        trainer = self.part(self.config_init, "trainer", default={})
        add_default_parts(trainer, self.subcommand, optimizer, self.folder, self.checked)
        trainer["callbacks"] += [CheckSharding(), MemoryAdvice(), SizesAdvice(), MixedPrecisionAdvice()]
        if self.subcommand == "fit":
            trainer["callbacks"] += [ValidationAdvice(), ConfigWins(self.config_dump, self.changed), BeginWandb()]
        if self.folder:
            program, words = self._typed
            self.events = RunEvents(self.folder, self.log, f"{program} {shlex.join(redacted(words))}")
            trainer["callbacks"].append(self.events)
        try:
            made = super().instantiate_trainer(**kwargs)
        except KeyError as error:
            if not str(error.args[0]).startswith("SLURM_"):
                raise
            raise ConfigurationError(
                f"trainer: SLURMEnvironment reads {error.args[0]}, which srun sets for the processes that it starts: "
                "outside of a job leave the overlay scale/slurm out, to check the rest as well"
            ) from error
        if pickles(made.strategy):
            raise ConflictError(
                "trainer.strategy: it starts processes that get the trainer by pickle, and a run of the command line "
                "cannot be pickled: use ddp, or ddp_fork"
            )
        prefetch(made, self.subcommand)
        skip_empty_hooks(made)
        started = 1
        if is_torchelastic_launched():
            started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > made.world_size:  # the processes would train independently, in one folder
            raise ConfigurationError(
                f"trainer: torchrun has started {started} processes, and devices times num_nodes is {made.world_size}"
            )
        if made.world_size > 1:
            wrap_method(made.strategy, "setup_environment", setup_environment)
        setattr(made.strategy, "save_checkpoint", partial(masking, made.strategy.save_checkpoint))  # noqa: B010
        for logger in made.loggers:
            if isinstance(logger, WandbLogger):
                hide_words()
                begin_late(logger, masked)
            setattr(logger, "log_hyperparams", partial(masking, logger.log_hyperparams))  # noqa: B010
        if self.folder and self.folder.goes_on and made.is_global_zero:
            for logger in made.loggers:
                keep_rows(logger, self.folder.step)
        return made

    def run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand. For a fit that ends early, print the last checkpoint and the next commands."""
        try:
            if subcommand == "fit" and self.datamodule is not None:
                rehearse(self.trainer, self.model, self.datamodule)
            with contextlib.nullcontext() if subcommand == "fit" else ends_on_sigterm():
                super().run_subcommand(subcommand)
        except DivergedError as error:
            self._end("diverged")
            raise DivergedError(f"the run has diverged\n{error}\n{last_saved(self.trainer)}") from error
        except SystemExit as request:
            number = signal_behind(request)
            saved = ""
            if number and self.events and os.path.exists(self.events.saved):
                saved = self.events.saved
            self._end(f"signal {number}" if number else "error", saved)
            raise
        except BaseException:
            self._end("error")
            raise

    def _end(self, reason: str, interrupted: str = "") -> None:
        """Record how a fit has ended; print the next commands, if there is a checkpoint to continue from."""
        if self.events is None or not self.trainer.is_global_zero:
            return
        steps = []
        if interrupted or reason == "done":
            steps = next_steps(self.trainer, self.allowed, self._typed[0], interrupted)
        self.events.trainer = self.trainer
        self.events.note("end", reason=reason, next=steps)
        self.log.quiet = ""
        if reason == "done":
            print(last_word(self.trainer, steps))
        elif steps:
            print("\n".join(announced(self.trainer, steps)), flush=True)

    @staticmethod
    def configure_optimizers(lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return optimizer and scheduler in Lightning's form. Override it as in the stock command line."""
        return optimizers.arrange(lightning_module, optimizer, lr_scheduler)

    def attach_optimizers(self, subcommand: str | None) -> None:
        """Let ``configure_optimizers`` build the config's optimizer over the parameters that are trainable then."""
        if not self.auto_configure_optimizers or self.optimizer_keys(subcommand) != {"optimizer", "lr_scheduler"}:
            super().attach_optimizers(subcommand)
            return
        optimizer = self.part(self.config_init, "optimizer")
        scheduler = self.part(self.config_init, "lr_scheduler")
        if not optimizer:
            if scheduler:
                raise ConfigurationError("lr_scheduler: it needs an `optimizer` in the config to act on")
            return
        plan = optimizers.OptimizerPlan(
            optimizer.as_dict(), scheduler.as_dict() if scheduler else None, type(self).configure_optimizers
        )
        self.tried_optimizer = plan.check()
        if subcommand == "fit" and is_overridden("configure_optimizers", self.model):
            rank_zero_info(f"optimizer: the config's replaces {type(self.model).__name__}.configure_optimizers")
        optimizers.attach(self.model, plan)

    def before_fit(self) -> None:
        """Prepare for signals."""
        ignore_warnings_of_the_end(done=False)

    def after_fit(self) -> None:
        """Print where the checkpoints are, and the next commands."""
        ignore_warnings_of_the_end(done=True)
        self._end("done")


def signal_behind(request: SystemExit) -> int:
    """Return the number of the signal that ends the program, or 0. Lightning exits with 1 after a KeyboardInterrupt."""
    if isinstance(request.__context__, KeyboardInterrupt):
        return int(signal.SIGINT)
    if isinstance(request.code, int) and request.code > 128:
        return request.code - 128
    return 0


def run_words(words: Sequence[str], quiet: bool, debug: bool, command: Command | None = None) -> int:
    """Run a command line whose names are checked; see :func:`lit_efficient.cli.defaults`."""
    try:
        LitEfficientCLI(args=list(words), quiet=quiet, command=command)
    except SystemExit as exit_request:
        number = signal_behind(exit_request)
        if number:
            return 128 + number
        if exit_request.code is None or isinstance(exit_request.code, int):
            return exit_request.code or 0
        raise
    except Exception as error:
        message = None if debug else explain(error)
        if message is None:
            raise
        return print_error(message, exit_code(error))
    return 0
