"""The exception for a user's mistake, with the one sentence that explains it."""


class UserError(ValueError):
    """A mistake in a config, a file or a request. The message is one sentence: the field, the value, what is allowed.

    The command line prints the message alone and exits with 2; every other exception is a bug and keeps its traceback.
    """
