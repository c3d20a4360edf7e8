import pytest
import torch
from lightning.pytorch.cli import SaveConfigCallback

from lit_efficient.cli.parsing import set_import_policy
from lit_efficient.internals import lightning_cli
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import module

Toy = type(module("lightning.pytorch"))


class Steps(lightning_cli.OpenCLI):
    """Runs nothing, and writes down what it is asked to do."""

    def __init__(self, arguments):
        self.asked = []
        super().__init__(Toy, args=["fit", *arguments], save_config_callback=None)

    def run_subcommand(self, subcommand):
        self.asked.append(("run", subcommand))

    def attach_optimizers(self, subcommand):
        self.asked.append(("attach", subcommand))
        super().attach_optimizers(subcommand)


@pytest.fixture
def cli(recwarn):
    def make(*arguments):
        return Steps(["--trainer.accelerator=cpu", "--trainer.logger=false", *arguments])

    return make


@leans_on("lightning", "LightningCLI._get", "lightning_cli")
def test_an_entry_is_found_inside_the_subcommand(cli):
    made = cli("--trainer.max_epochs=3")
    assert made.part(made.config, "trainer").max_epochs == 3
    assert made.part(made.config, "nothing", "default") == "default"


@leans_on("lightning", "LightningCLI._dump_config", "lightning_cli")
def test_the_config_is_plain_data(cli):
    made = cli("--trainer.max_epochs=3")
    made.dump_config()
    assert made.config_dump["trainer"]["max_epochs"] == 3


@leans_on("lightning", "LightningCLI._run_subcommand", "lightning_cli")
def test_a_subcommand_need_not_run(cli):
    assert cli().asked[-1] == ("run", "fit")


@leans_on("lightning", "LightningCLI._add_configure_optimizers_method_to_model", "lightning_cli")
def test_the_model_gets_the_config_s_optimizer_where_we_say(cli):
    made = cli("--optimizer=torch.optim.SGD", "--optimizer.lr=0.25")
    assert made.asked[0] == ("attach", "fit")
    assert made.model.configure_optimizers().defaults["lr"] == 0.25


@leans_on("lightning", "LightningCLI._parser, _optimizers and _lr_schedulers", "lightning_cli")
def test_the_parser_knows_its_optimizers(cli):
    assert cli().optimizer_keys("fit") == {"optimizer", "lr_scheduler"}


@leans_on("lightning", "LightningCLI._parse_ckpt_path", "lightning_cli")
def test_a_checkpoint_does_not_override_the_config(cli, tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"hyper_parameters": {"no_such_argument": 1}}, path)  # which the stock command line refuses
    assert cli(f"--ckpt_path={path}").part is not None


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@leans_on("lightning", "the hyper-parameter _class_path", "lightning_cli")
def test_a_checkpoint_of_a_command_line_names_the_class(tmp_path):
    from lightning.pytorch.cli import LightningCLI

    set_import_policy(["tests"])  # which an earlier test of the process may have set otherwise
    config = [
        "--seed_everything=0",
        "--trainer.limit_val_batches=0",
        "--model",
        f"{__name__}.Named",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
    ]
    silent = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary")]
    quick = ["--trainer.max_epochs=0", "--trainer.limit_val_batches=0", f"--trainer.default_root_dir={tmp_path}"]
    made = LightningCLI(
        Toy, subclass_mode_model=True, args=["fit", *config, *silent, *quick], save_config_callback=SaveConfigCallback
    )
    assert made.model.hparams[lightning_cli.CLASS_PATH] == f"{__name__}.Named"


class Named(Toy):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return [torch.ones(1)]

    val_dataloader = train_dataloader
