"""A lock on a folder, so that two runs cannot write the same one."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from flipgrad import files
from flipgrad.errors import InputError

if sys.platform != "win32":
    import fcntl


class FolderLock:
    """Holds a folder until it is released or the process ends, however that happens.

    The system frees the lock of a dead process, so a file that was left behind locks nothing. Where the system has no such
    locks (Windows) nothing is locked. Written by hand, as the package filelock neither names the holder nor takes its file
    away.

    Raises:
        InputError: if another process, which is named, holds the folder.
    """

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self._file = folder / self.NAME
        self._descriptor: int | None = None
        if sys.platform == "win32":
            return
        while self._descriptor is None:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | files.NO_LINK, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                fix = "wait for it or stop it, or give another --output"
                raise InputError(f"'{folder}' is being written by another run (process {holder}); {fix}") from None
            # The file may have been taken away by its last holder between opening and locking: then this locks nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._file)):
                    self._descriptor = descriptor
            if self._descriptor is None:
                os.close(descriptor)
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        except OSError:
            # A full disk: the folder is left as it was.
            self.release()
            raise

    def release(self) -> None:
        """Let others have the folder. A second call does nothing."""
        if self._descriptor is not None:
            # What is left behind, where nothing may be removed, locks nothing.
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
