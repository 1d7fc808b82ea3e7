"""The folders that Orbax writes a checkpoint into before it renames them."""

from typing import Any

import orbax.checkpoint as ocp


class TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """Orbax's own, but where it cannot be made, that is said at the end of the save.

    Said at once, it leaves other threads of the save, in all processes, waiting for the folder, and
    the program cannot end before they do: 300 s (0.12.8, ``multihost.coordination_timeout``).
    Without the folder they fail too, soon.
    """

    _failure: OSError | None = None

    async def create(self) -> Any:
        """Makes the folder, or remembers why not."""
        try:
            return await super().create()
        except OSError as error:
            self._failure = error
            return self.get()

    async def finalize(self) -> None:
        """Renames the folder.

        Raises:
            OSError: that of :meth:`create` too.
        """
        if self._failure is not None:
            raise self._failure
        await super().finalize()
