"""What the program that is being traced is for, where an operation has to know."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_traced_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("traced_for", default=None)


def platform() -> str:
    """What the program that is being traced is for: "cpu", or "gpu" or "cuda".

    For operations whose choice reaches into the backward pass. `lax.platform_dependent` decides
    later, but what its other branch would keep is then kept too, as zeros.
    """
    return _traced_for.get() or jax.default_backend()


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Has :func:`platform` name another one than the machine's: for programs that only compile."""
    token = _traced_for.set(name)
    try:
        yield
    finally:
        _traced_for.reset(token)
