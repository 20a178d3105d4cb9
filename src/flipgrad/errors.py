"""The one exception that means "the input was wrong", as opposed to "flipgrad is wrong"."""


class InputError(ValueError):
    """Bad input: the message says which argument, what was expected, what came, and how to fix it.

    The command line prints it as one line and exits with code 2.
    """
