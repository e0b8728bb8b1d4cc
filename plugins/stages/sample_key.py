"""Key of a dataset: two datasets with one key have the same samples."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import io
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.api import files_of_data, fingerprint_of_data

_FORMAT = "1"
"""Version of the files; another one finds none of them."""
KEY_DIGITS = 32


def key_of_dataset(data: Any, fingerprint: str | None) -> str | None:
    """Returns the key of a dataset: its files, settings and code, and the installed packages.

    Args:
        data: The dataset. Attributes that are absolute paths are its files.
        fingerprint: Digest of all data of the source, if there is one.

    Returns:
        Hexadecimal digits; None if nothing identifies its files, or its attributes cannot be
        pickled.
    """
    # The state contains the rows.
    content = fingerprint_of_data(data, with_rows=False)
    if content is None and fingerprint is None:
        return None
    try:
        state = _state(data)
    except Exception:
        return None
    parts = [_FORMAT, str(content), str(fingerprint), state, _code(type(data)), _packages()]
    # The fingerprint of files of more than 4 GiB covers only their ends.
    for path in files_of_data(data):
        status = path.stat()
        parts.append(f"{status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:KEY_DIGITS]


class _Values(pickle.Pickler):
    """Pickles tensors as their values, because torch pickles addresses of memory with them."""

    def reducer_override(self, value: Any) -> Any:
        """Returns how a tensor is pickled."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = str(value.dtype), tuple(value.shape), content.numpy().tobytes()
        return tuple, (parts,)


def _state(data: Any) -> str:
    buffer = io.BytesIO()
    pickler = _Values(buffer, protocol=4)
    # Otherwise equal values that are one object would be pickled in another way.
    pickler.fast = True
    pickler.dump(data)
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def _code(cls: type[Any]) -> str:
    """Returns a digest of the modules with the class and its bases."""
    digest = hashlib.sha256(f"{cls.__module__}.{cls.__qualname__}".encode())
    for base in cls.__mro__:
        try:
            digest.update(Path(inspect.getfile(base)).read_bytes())
        # Built-in classes have no file.
        except (TypeError, OSError):
            digest.update(base.__qualname__.encode())
    return digest.hexdigest()


@cache
def _packages() -> str:
    """Returns the versions of all packages: another one of a decoder may decode differently."""
    # An import of setuptools appends its folder of vendored packages, so keys would change.
    folders = [folder for folder in sys.path if not Path(folder, "..", "__init__.py").exists()]
    packages = importlib.metadata.distributions(path=folders)
    return " ".join(sorted({f"{package.name} {package.version}" for package in packages}))
