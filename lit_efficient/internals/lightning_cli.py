"""Steps of Lightning's command line that are private methods there. Checked with lightning 2.6.6."""

from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

CLASS_PATH = "_class_path"  # the key of the class in the hyper-parameters that Lightning's command line saves


class OpenCLI(LightningCLI):
    """Lightning's command line with public names for its private steps. A checkpoint overrides no config."""

    def part(self, config: Namespace, key: str, default: object = None) -> Any:
        """Return an entry of a config, inside the subcommand if there is one: ``_get``."""
        return self._get(config, key, default)

    def dump_config(self) -> None:
        """Set ``config_dump``, as ``_dump_config`` does, to the checked config as plain data."""
        text = self.parser.dump(self.config, "yaml", False, skip_validation=True, skip_link_targets=False)
        dump = yaml.safe_load(text)
        if "subcommand" in self.config:
            self.config_dump = dump[self.config.subcommand]
        else:
            self.config_dump = dump

    def run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand after all parts are built: ``_run_subcommand``."""
        super()._run_subcommand(subcommand)

    def attach_optimizers(self, subcommand: str | None) -> None:
        """Give the model the config's optimizer: ``_add_configure_optimizers_method_to_model``."""
        super()._add_configure_optimizers_method_to_model(subcommand)

    def optimizer_keys(self, subcommand: str | None) -> set[str]:
        """Return the config keys of optimizers and schedulers, such as ``optimizer``.

        They are read from ``_optimizers`` and ``_lr_schedulers`` of the parser that ``_parser`` returns.
        """
        parser = self._parser(subcommand)
        return {*parser._optimizers, *parser._lr_schedulers}

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        self.attach_optimizers(subcommand)

    def _parse_ckpt_path(self) -> None:
        pass
