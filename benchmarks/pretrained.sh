#!/usr/bin/env bash
# What to try with pretrained weights, which nobody has tried here: no hub could be reached. Each step says what should
# come out; what comes out otherwise is a finding.
#
#   benchmarks/pretrained.sh                prints the steps
#   benchmarks/pretrained.sh qwen           runs one: qwen, sd15 or taesd (after sd15)
#   LIMIT="--trainer.max_steps 2" benchmarks/pretrained.sh qwen     with further options of fit
#
# Needs the hub, pip install -e '.[llm,diffusion]', and for sd15 a GPU of 8 GB or patience.
set -euo pipefail
configs=$(cd "$(dirname "$0")/pretrained" && pwd)
run() { python -m lit_efficient "$@"; }

# A LoRA of a small Qwen. What should come out:
#   preview    answers alone are learned, and the end-of-turn token <|im_end|> in every turn
#   validate   the base as it is, without adapters: a perplexity far below the 151 of the small base of configs/llm
#   fit        "LoRA 196 layers" (7 in each of 28 blocks); the loss falls from the first 20 steps on
#   export     no error: it has loaded the folder with PEFT (merged: with transformers) and compared the outputs
#   generate   a function body of Python for the prompt, which ends by itself
qwen() {
  run preview -c "$configs/qwen_lora.yaml"
  run validate -c "$configs/qwen_lora.yaml" --without LoRA
  run fit -c "$configs/qwen_lora.yaml" ${LIMIT:-}
  run export runs/pretrained/qwen/latest/last.ckpt --format peft --output runs/pretrained/qwen_adapter
  run export runs/pretrained/qwen/latest/last.ckpt --format merged --output runs/pretrained/qwen_merged
  run generate --ckpt runs/pretrained/qwen/latest/last.ckpt --chat --prompt "Write a function that reverses a list."
}

# A LoRA of Stable Diffusion 1.5. What should come out:
#   cache-latents   latents [4, 64, 64] of every crop, once
#   fit             "LoRA 128 layers" (8 in each of 16 attention blocks); samples show a temple and a dahlia, of the
#                   colours of the two photographs from some hundred steps on; at step 0 they are the base's
#   export          a folder that StableDiffusionPipeline loads, and with --lora diffusers one for load_lora_weights
sd15() {
  python - <<'END'
import json
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_image

captions = {"china": "a photograph of a temple with tiled roofs above trees", "flower": "a photograph of an orange dahlia"}
folder = Path("runs/pretrained/images")
folder.mkdir(parents=True, exist_ok=True)
rows = []
for name, caption in captions.items():
    whole = Image.fromarray(load_sample_image(f"{name}.jpg"))
    for x in range(0, 214, 53):
        file = f"{name}_{x}.png"
        whole.crop((x, 0, x + 427, 427)).save(folder / file)
        rows.append(json.dumps({"file_name": file, "text": caption}))
(folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
END
  run cache-latents -c "$configs/sd15_lora.yaml" --batch_size 2
  run fit -c "$configs/sd15_lora.yaml" ${LIMIT:-}
  run sample --ckpt runs/pretrained/sd15/latest/last.ckpt --output runs/pretrained/sd15.png --seeds 0-1
  run export runs/pretrained/sd15/latest/last.ckpt --format diffusers --output runs/pretrained/sd15_pipeline
}

# TAESD's previews. What should come out:
#   fit   the pictures in samples/ come from the Tiny decoder: as sd15's, softer, and faster to decode; an autoencoder of
#         another number of channels is refused by name
taesd() {
  run fit -c "$configs/sd15_lora.yaml" --model.samples.preview.name_or_path madebyollin/taesd ${LIMIT:-}
}

if [ $# -eq 0 ]; then
  sed -n '/^# A LoRA of a small Qwen/,/^if /p' "$0" | sed '$d'
else
  for step in "$@"; do
    case "$step" in
      qwen | sd15 | taesd) "$step" ;;
      *) echo "error: there is no step '$step'; steps: qwen, sd15, taesd" >&2 && exit 2 ;;
    esac
  done
fi
