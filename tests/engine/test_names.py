"""The text of a model is found without its weights, and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.engine.checkpoints import resolve
from services.engine.names import converted, find, find_text
from services.types.errors import ErrorCode, WealdError

FIND_TEXT = """
import sys
from services.engine.names import find_text

print(find_text(sys.argv[1]))
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
"""


def test_a_directory_is_its_own_place(tmp_path: Path) -> None:
    assert find(str(tmp_path)) == find_text(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_found_and_its_text_lies_where_it_was_converted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEALD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert find(str(file)) == file
    converted(file).mkdir(parents=True)
    assert find_text(str(file)) == resolve(str(file)) == converted(file)
    assert converted(file).parent == tmp_path / "cache"


@pytest.mark.slow
def test_a_file_that_cannot_be_converted_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEALD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no weights")
    with pytest.raises(WealdError, match=f"{file} cannot be converted: .+") as refused:
        find_text(str(file))
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT
    assert "Traceback" not in refused.value.message


@pytest.mark.parametrize("name", ["nothing", "no/where/at.gguf", "owner/model"])
def test_a_model_that_is_nowhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WealdError) as refused:
        find_text(name)
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT


@pytest.mark.slow
def test_the_text_of_the_packaged_model_is_found_without_torch() -> None:
    command = [sys.executable, "-c", FIND_TEXT, "smollm2-135m"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert Path(said.strip()) == resolve("smollm2-135m")
