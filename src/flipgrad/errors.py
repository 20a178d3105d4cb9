"""The exceptions that mean something to a person: the input was wrong, or the disk is full."""


class InputError(ValueError):
    """Bad input: the message says which argument, what was expected, what came, and how to fix it.

    The command line prints it as one line and exits with code 2.
    """


class StorageError(OSError):
    """A file could not be written, for want of space say; what was there before is whole."""
