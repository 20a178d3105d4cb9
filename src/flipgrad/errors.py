"""The exceptions that mean something to a person: the input was wrong, the disk is full, or work went astray."""


class InputError(ValueError):
    """Bad input: the message says which argument, what was expected, what came, and how to fix it.

    The command line prints it as one line and exits with code 2.
    """


class StorageError(OSError):
    """A file could not be written, for want of space say; what was there before is whole."""


class DivergenceError(RuntimeError):
    """A gradient, a weight or the loss is no longer a number, or the loss has exploded; what was saved before is kept."""


class CellError(RuntimeError):
    """Cells of ``flipgrad reproduce``, which are independent trainings, failed; the results of all others are kept."""
