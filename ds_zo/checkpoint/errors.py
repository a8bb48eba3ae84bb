"""The error that this package raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or must not be loaded. Earlier files and the engine are unchanged."""


@contextmanager
def reading_content(folder: Path, part: str) -> Iterator[None]:
    """Turns errors of code that reads a checkpoint's content, and changes nothing, into a `CheckpointError` of damage.

    `part` names the content that is being read.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise _damage(folder, part, error) from error
    except (SafetensorError, OSError) as error:
        raise _damage(folder, part, error) from error


def _damage(folder: Path, part: str, error: Exception) -> CheckpointError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return CheckpointError(f"checkpoint {folder} is damaged: {part} is not what was written ({cause})")
