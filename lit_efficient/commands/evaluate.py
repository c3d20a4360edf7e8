"""``python -m lit_efficient evaluate --ckpt FILE --tasks NAME ...``: tasks of lm-eval on a checkpoint."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.commands.prompts import add_model_options, default_device, load_model
from lit_efficient.errors import ConfigurationError, check_installed


def run(argv: Sequence[str]) -> int:
    """Run ``evaluate``."""
    parser = argparse.ArgumentParser(
        "lit_efficient evaluate",
        description="Run tasks of lm-eval (pip install -e '.[eval]') on the model of a checkpoint, with its adapters "
        "and averages, or on another model. The figures are those of lm-eval's own command on the merged export.",
    )
    add_model_options(parser, "a checkpoint of LanguageModeling, or of a task derived from it")
    parser.add_argument("--model", metavar="NAME", help="instead of --ckpt: a name on a hub, a folder or a GGUF file")
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="names of tasks or groups, whose data is downloaded, or YAML files of your own",
    )
    parser.add_argument(
        "--include_path",
        metavar="FOLDER",
        help="folder with further tasks as YAML files; Python functions that they name are run",
    )
    parser.add_argument("--limit", type=int, help="number of rows of each task (default: all)")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question (default: those of the task)")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--chat", action="store_true", help="format questions by the tokenizer's chat template")
    parser.add_argument("--output", metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args(argv)
    if (arguments.ckpt is None) == (arguments.model is None):
        parser.error("one of the arguments --ckpt --model is required")
    from lit_efficient.data.text.chat_tokenizer import of_transformers
    from lit_efficient.models.libraries.causal_lm import CausalLMConfig
    from lit_efficient.models.libraries.lm_eval_tasks import Harness, figures, table
    from lit_efficient.tasks.loading import load_hugging_face, load_language_model

    names = ("tasks", "include_path", "limit", "num_fewshot", "batch_size", "chat")
    harness = Harness(**{name: getattr(arguments, name) for name in names})
    harness.check("evaluate")
    check_installed("evaluate", "lm_eval")
    if arguments.output is not None and not Path(arguments.output).absolute().parent.is_dir():
        raise ConfigurationError(f"evaluate: --output: there is no folder for {arguments.output}")
    if arguments.ckpt is not None:
        model, about = load_model(load_language_model, arguments)
    else:
        model = load_hugging_face(CausalLMConfig(arguments.model, dtype="auto"))
        model = model.to(arguments.device or default_device())
        about = {"model": arguments.model}
    tokenizer = of_transformers(model.tokenizer)
    found = harness.run("evaluate", model.network, tokenizer, model.tokenizer_state["stop"])
    print(table(found))
    if arguments.output is not None:
        written: dict[str, object] = {**about, "metrics": figures(found)}
        for key in ("results", "groups", "n-samples", "versions"):
            if key in found:
                written[key] = found[key]
        Path(arguments.output).write_text(json.dumps(written, indent=2, default=str) + "\n", "utf-8")
    return 0
