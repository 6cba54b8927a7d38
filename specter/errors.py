"""The exception for users: what is wrong, and the remedy."""


class SpecterError(Exception):
    """Bad input or an impossible request.

    Args:
        what: the fault, by name and value.
        remedy: what the user can do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy
