from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_efficient.data.text.image_texts import read_processor
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face_processors import load_processor, processor_class, processor_files
from tests.image_text_kit import picture, save_model
from tests.internals.leaning import leans_on


@leans_on("transformers", "AutoVideoProcessor and check_argument_for_proper_class", "hugging_face_processors")
def test_a_processor_is_loaded_without_its_part_for_videos_where_torchvision_is_missing(tmp_path: Path) -> None:
    base = save_model("qwen2_5_vl", tmp_path / "base")
    processor = load_processor(str(base))
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert (processor.video_processor is None) == (find_spec("torchvision") is None)
    made = processor(text=["<|image_pad|>"], images=[[picture(0, 56, 56)]], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert made["input_ids"].shape == (1, 4)


def test_the_files_of_a_processor_are_kept_as_they_are(tmp_path: Path) -> None:
    base = save_model("gemma3", tmp_path / "base")
    files = processor_files(str(base))
    assert files == {name: (base / name).read_text() for name in ("processor_config.json", "preprocessor_config.json")}


@leans_on("transformers", "_backends", "hugging_face_processors")
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_a_missing_package_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"PixtralProcessor needs torchvision: pip install torchvision"):
        processor_class("PixtralProcessor")


@pytest.mark.skipif(find_spec("num2words") is not None, reason="num2words is installed")
def test_the_error_about_the_processor_of_smolvlm_names_its_package(tmp_path: Path) -> None:
    base = save_model("smolvlm", tmp_path / "base")
    with pytest.raises(ConfigurationError, match="Package `num2words` is required"):
        read_processor(str(base), None)


@pytest.mark.parametrize("name", ["BertModel", "os", "NoProcessor"])
def test_only_processors_of_transformers_are_built(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"transformers has no processor {name!r}"):
        processor_class(name)
