"""The one exception a user of Specter should ever read."""


class SpecterError(Exception):
    """Bad input or an impossible request, named together with its remedy.

    Args:
        what: the thing that is wrong, by name and value.
        remedy: what the user can do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy
