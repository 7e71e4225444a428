"""The error that bad user input raises, wherever in the package it is found."""


class InputError(ValueError):
    """A value the user gave cannot work; the message names the value and the remedy.

    The command line tools print its message alone, without a traceback.
    """
