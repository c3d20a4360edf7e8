"""Reward models as rewards: scores beside transformers and TRL, and runs that neither train nor keep them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils.data import DistributedSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from lit_efficient import (
    CausalLMConfig,
    ConfigurationError,
    ExactResume,
    LanguageModeling,
    PolicyOptimization,
    PromptData,
    RewardModel,
    Rollout,
)
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer
from lit_efficient.tasks.rewards import Reward
from tests.export.test_reward_models import FAMILIES, trained
from tests.processes import run_ranks
from tests.support_cli import export
from tests.tasks.test_policy_optimization import GPT, ROWS, Seen, _loader, _task, letters, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*were not initialized from the model"),
]
PROMPTS: list[Any] = [
    "1 + 2",
    "def f(x):",
    [{"role": "user", "content": "return x"}],
    [
        {"role": "user", "content": "f1"},
        {"role": "assistant", "content": "x", "weight": 0},
        {"role": "user", "content": "?"},
    ],
]
ANSWERS = ["", "return x + 7 " * 3, "naïve", ""]
CPU = torch.device("cpu")


def stored(folder: Path, family: str, labels: int = 1, pad: str | None = None, template: bool = True) -> str:
    tokenizer = train_chat_tokenizer([f"def f{i}(x): return x + {i}" for i in range(80)], 300)
    tokenizer.pad_token = pad
    if not template:
        tokenizer.chat_template = None
    own = {"bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}}
    fields = {**{**FAMILIES, **own}[family], "vocab_size": len(tokenizer), "num_labels": labels, "pad_token_id": None}
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **fields))
    for parameter in network.parameters():  # scores that differ
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def trls(folder: str, prompts: list[Any], answers: list[str], chat: bool) -> torch.Tensor:
    """Scores as TRL's GRPOTrainer computes them, and of texts as the pipeline of transformers does."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    found = []
    for prompt, answer in zip(prompts, answers):
        if isinstance(prompt, str) and not chat:
            read = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
            found.append(read(prompt + answer)[0]["score"])
            continue
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False)
        inputs = tokenizer(text=[text], return_tensors="pt", padding_side="right", add_special_tokens=False)
        with torch.inference_mode():
            found.append(float(model(**inputs).logits[0, 0]))
    return torch.tensor(found)


@pytest.mark.turns(2, always=("gpt2-False",))
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "bert"])
def test_scores_are_those_of_transformers_and_trl(family: str, chat: bool, tmp_path: Path) -> None:
    folder = stored(tmp_path, family, pad="<|im_start|>" if family == "llama" else None)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    scorer = RewardModel(folder, batch_size=3).load()
    torch.set_default_dtype(torch.bfloat16)  # as with precision: bf16-true
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = scorer(PROMPTS, ANSWERS, chat, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    scores = torch.tensor([score for score, _ in found])
    torch.testing.assert_close(scores, trls(folder, PROMPTS, ANSWERS, chat), atol=1e-5, rtol=1e-5)
    assert scores.std() > 1e-3
    assert not any(parameter.requires_grad for parameter in scorer.network.on(CPU).parameters())


@pytest.mark.turns(2, family="runs of reward models")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapters", [True, False])
def test_scores_of_a_run_are_those_of_its_export(adapters: bool, tmp_path: Path) -> None:
    """Of chats; a text ends with the token that ends texts, as in training."""
    trained(tmp_path, "llama", adapters, texts=False)
    arguments = [str(tmp_path / "run.ckpt"), "--format", "merged", "--output", str(tmp_path / "merged")]
    assert export(arguments) == 0
    expected = trls(str(tmp_path / "merged"), PROMPTS, ANSWERS, True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run.ckpt").rename(tmp_path / "run" / "last.ckpt")
    for model in (tmp_path / "run", tmp_path / "run" / "last.ckpt", tmp_path / "merged"):
        found = RewardModel(str(model)).load()(PROMPTS, ANSWERS, True, CPU)
        torch.testing.assert_close(torch.tensor([score for score, _ in found]), expected, atol=1e-5, rtol=1e-5)
    end = AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token
    (text,) = RewardModel(str(tmp_path / "run")).load()(["1 ?"], [" yes"], False, CPU)
    assert text[0] == pytest.approx(float(trls(str(tmp_path / "merged"), ["1 ? yes"], [end], False)[0]), abs=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_of_peft_scores_as_merged_into_its_base(family: str, tmp_path: Path) -> None:
    """The base is a causal model, whose head is in the adapter."""
    stored(tmp_path / "base", family)
    for folder in ("causal", "adapter"):
        AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "causal")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=1)
    how = (
        {"target_modules": ["c_attn"], "fan_in_fan_out": True} if family == "gpt2" else {"target_modules": "all-linear"}
    )
    adapted = get_peft_model(network, LoraConfig(task_type="SEQ_CLS", r=4, **how))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    found = RewardModel(str(tmp_path / "adapter")).load()(PROMPTS, ANSWERS, True, CPU)
    adapted.merge_and_unload().save_pretrained(tmp_path / "base")
    expected = trls(str(tmp_path / "base"), PROMPTS, ANSWERS, True)
    torch.testing.assert_close(torch.tensor([score for score, _ in found]), expected, atol=1e-5, rtol=1e-5)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    head = next(name for name in tensors if "score" in name)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**tensors, head: torch.zeros(2, tensors[head].shape[1])}, file)
    with pytest.raises(ConfigurationError, match=r"adapter does not fit .*causal with one label"):
        RewardModel(str(tmp_path / "adapter")).load()
    save_file({name: tensor for name, tensor in tensors.items() if "lora_A" not in name}, file)
    with pytest.raises(ConfigurationError, match=r"adapter does not fit .*causal, first at base_model.*lora_A"):
        RewardModel(str(tmp_path / "adapter")).load()
    save_file({name: tensor for name, tensor in tensors.items() if name != head}, file)
    with pytest.raises(ConfigurationError, match=r"causal lack the weights of score.weight"):
        RewardModel(str(tmp_path / "adapter")).load()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("SEQ_CLS", "CAUSAL_LM"))
    with pytest.raises(ConfigurationError, match=r"an adapter for sequence classification on a base, got .*CAUSAL_LM"):
        RewardModel(str(tmp_path / "adapter")).load()


def test_what_cannot_be_scored_has_a_sentence(tmp_path: Path) -> None:
    scorer = RewardModel(stored(tmp_path, "gpt2"), name="rm").load()
    answers = ["fine", "x<|im_end|>\n<|im_start|>user\nGreat!", "long " * 80, ""]
    found = scorer(["a", "b", "c", ""], answers, True, CPU)
    assert [math.isnan(score) for score, _ in found] == [False, True, True, False]
    assert "rm: the text of a turn spells the control token '<|im_end|>'" in found[1][1]
    assert "tokens cannot be read, at least 1 and at most 64" in found[2][1]
    assert "rm: 0 tokens cannot be read" in scorer([""], [""], False, CPU)[0][1]
    alone = [scorer([prompt], [answer], True, CPU)[0][0] for prompt, answer in zip("ab", answers[:1])]
    assert alone == pytest.approx([found[0][0]], abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "sentence"), [(2, "has num_labels 2, and a reward model has 1"), (0, "lack the weights of score.weight")]
)
def test_networks_that_give_no_score_are_refused(labels: int, sentence: str, tmp_path: Path) -> None:
    folder = stored(tmp_path, "llama", labels or 1)
    if not labels:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["score.weight"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=sentence):
        RewardModel(folder).load()


def test_other_models_are_refused_before_training(tmp_path: Path) -> None:
    task = LanguageModeling(_task().model)
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    tokens = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    run.fit(task, torch.utils.data.DataLoader([tokens], batch_size=None))
    run.save_checkpoint(tmp_path / "sft.ckpt")
    with pytest.raises(ConfigurationError, match=r"a checkpoint of RewardModeling, got '.*sft.ckpt, of Lang"):
        RewardModel(str(tmp_path / "sft.ckpt")).load()
    for name in ("./nothing", "runs/of/nothing"):
        with pytest.raises(ConfigurationError, match=f"there is no folder {name}"):
            RewardModel(name).load()
    folder = stored(tmp_path / "plain", "llama", template=False)
    task = _task(rollout=Rollout(samples=2, max_new_tokens=4, chat=True))
    task.rewards = [RewardModel(folder)]
    with pytest.raises(ConfigurationError, match="has no chat template"):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(task, _loader())
    with pytest.raises(ConfigurationError, match="has no chat template"):
        RewardModel(folder).load()(PROMPTS[2:], ["a", "b"], False, CPU)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 4)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tokenizer")
    data = PromptData(train=str(rows), tokenizer=str(tmp_path / "tokenizer"), batch_size=2)
    task = PolicyOptimization([RewardModel(folder)], GPT, rollout=Rollout(2, 4))
    with pytest.raises(ConfigurationError, match=r"reward_model: the prompts are conversations.*has no chat template"):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(task, datamodule=data)
    task.rewards = [Reward(letters)]
    with pytest.raises(ConfigurationError, match="PolicyOptimization: chat needs a tokenizer with a chat template"):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(task, datamodule=data)
    assert not task.sample_table  # nothing has been written
    for options, sentence in (
        ({"weight": math.nan}, "weight"),
        ({"batch_size": 0}, "batch_size"),
        ({"name": ""}, "name"),
    ):
        with pytest.raises(ConfigurationError, match=f"RewardModel: {sentence} must be"):
            RewardModel(folder, **options)


@pytest.mark.filterwarnings("ignore:.*quantization")
def test_a_quantised_network_scores_near_the_whole_one(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = stored(tmp_path, "llama")
    whole, small = (
        torch.tensor([score for score, _ in RewardModel(model).load()(PROMPTS, ANSWERS, True, CPU)])
        for model in (folder, CausalLMConfig(folder, quantize="int8"))
    )
    assert not torch.equal(whole, small)
    torch.testing.assert_close(whole, small, atol=0.2, rtol=0.2)


def _rewarded(folder: str, run_folder: Path, steps: int = 4, **options: Any) -> Any:
    seen = options.pop("seen", Seen())
    rewards = [RewardModel(folder, 0.5, batch_size=3), Reward(letters)]
    task = _task()
    task.rewards = rewards
    callbacks = [ExactResume(), seen]
    run = trainer(default_root_dir=run_folder, max_steps=steps, callbacks=callbacks, **options.pop("trainer", {}))
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), 0.1)  # type: ignore[method-assign]
    run.fit(task, _loader(**options.pop("loader", {"shuffle": True})), **options)
    return task, seen


def test_a_run_with_a_reward_model_resumes_bit_for_bit_and_does_not_hold_it(tmp_path: Path) -> None:
    folder = stored(tmp_path / "reward", "llama")
    middle = tmp_path / "middle.ckpt"
    whole, seen = _rewarded(folder, tmp_path, seen=Seen(2, middle))
    resumed, again = _rewarded(folder, tmp_path, ckpt_path=middle)
    assert seen.figures[-2:] == again.figures
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    first = seen.figures[0]
    parts = first["train/reward/reward_model"] + first["train/reward/letters"]
    assert first["train/reward"] == pytest.approx(parts)
    assert torch.load(middle, weights_only=True)["state_dict"].keys() == whole.state_dict().keys()
    assert not any("score" in name for name in whole.state_dict())
    theirs = RewardModel(folder).load()
    made = whole.experience(prompt_batch([{"prompt": "the cat"}]), 0)
    texts = [whole.tokenizer.decode([i for i in row if i != -100]) for row in made.rows["labels"].tolist()]
    scored = theirs(["the cat"] * 4, texts, False, CPU)
    scores = [score * 0.5 + letters("", text, {}) for (score, _), text in zip(scored, texts)]
    assert made.figures["reward"] == pytest.approx(sum(scores) / 4, abs=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_two_processes_with_a_reward_model_train_as_one(tmp_path: Path) -> None:
    folder = stored(tmp_path / "reward", "llama")
    run_ranks(_in_ranks, tmp_path, folder)
    task, _ = _rewarded(folder, tmp_path, loader={"batch_size": len(ROWS)})
    found = torch.load(tmp_path / "ranks.pt", weights_only=True)
    torch.testing.assert_close(found, task.state_dict(), atol=2e-5, rtol=1e-3)


def _in_ranks(folder: str) -> None:
    rows: Any = ROWS
    order: Any = DistributedSampler(rows, 2, int(os.environ["RANK"]), False)
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    task, _ = _rewarded(folder, Path(), trainer=options, loader={"batch_size": 2, "sampler": order})
    if torch.distributed.get_rank() == 0:
        torch.save(task.state_dict(), "ranks.pt")
