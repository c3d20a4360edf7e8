"""``python -m lit_efficient generate --ckpt FILE --prompt TEXT``: continue texts with a language model, or chat."""

import argparse
from collections.abc import Sequence

from lit_efficient.commands.prompts import (
    adapters_of,
    add_model_options,
    check_ckpt,
    forgiving_streams,
    load_model,
    prompts_of,
)
from lit_efficient.errors import refusal


def run(argv: Sequence[str]) -> int:
    """Run ``generate``."""
    parser = argparse.ArgumentParser(
        "lit_efficient generate",
        description="Continue texts with the model of a checkpoint. Adapters are applied, and the averaged weights of "
        "EMA or CheckpointAverage are used if the run kept them. The same seed gives the same text. With --chat and "
        "no prompt it starts a conversation.",
    )
    add_model_options(parser, "a checkpoint of LanguageModeling, or of a task derived from it")
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="TEXT",
        help='texts to continue, or one file: one text per line, or a .jsonl of {"prompt": "..."}',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="format each prompt as a user's turn by the chat template, and print the answer alone",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image that each prompt is about, for a model trained with a processor; may be repeated; implies --chat",
    )
    parser.add_argument(
        "--max_new_tokens", type=int, help="default: 128, in a conversation 512; at most half of the model's context"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME[=FOLDER]",
        help="adapter that writes, of a model with several: once, or for each prompt; default is the trained one, base "
        "the model without adapters; FOLDER: load a further adapter",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument(
        "--top_p", type=float, default=0.95, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--top_k", type=int, default=0, help="sample from this many most likely tokens; 0: all")
    parser.add_argument(
        "--min_p", type=float, default=0.0, help="minimum probability, relative to the most likely token"
    )
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="above 1: tokens that occurred before are less likely"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="prompt number i uses seed + i")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts at a time; does not change the texts")
    arguments = parser.parse_args(argv)
    check_ckpt(arguments, "generate")
    texts_alone = "" if arguments.chat else "add --chat"
    if "" in arguments.stop:
        raise refusal("generate", "--stop", "a text that is not empty", "")
    given = [*(arguments.prompt or ()), *prompts_of(arguments.prompts or (), "generate", texts_alone)]
    if arguments.image and not given:
        parser.error("--image needs --prompt or --prompts")
    if not given and not arguments.chat:
        parser.error("one of the arguments --prompt --prompts --chat is required")
    from lit_efficient.models.generation.batched import longest_row
    from lit_efficient.models.generation.sampling import Sampling
    from lit_efficient.tasks.loading import load_language_model

    forgiving_streams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: getattr(arguments, name) for name in names}
    Sampling(**sampling).check("generate")
    model, _ = load_model(load_language_model, arguments)
    if not given:
        from lit_efficient.commands.chat import Conversation

        how = Sampling(**sampling)
        adapters = adapters_of(arguments.adapter, model, 1)
        return Conversation(model, how, arguments.max_new_tokens, arguments.stop, arguments.seed, adapters).hold()
    most = arguments.max_new_tokens
    if most is None:
        most = min(128, longest_row(model.network) // 2)
    chat = arguments.chat or bool(arguments.image)
    texts = model.generate_text(
        given,
        max_new_tokens=most,
        seed=arguments.seed,
        chat=chat,
        with_prompts=not chat,
        batch_size=arguments.batch_size,
        stop=arguments.stop,
        images=[arguments.image] * len(given) if arguments.image else (),
        adapters=adapters_of(arguments.adapter, model, len(given)),
        **sampling,
    )
    for text in texts:
        print(text)
    return 0
