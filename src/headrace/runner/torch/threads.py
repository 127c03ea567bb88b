"""How many threads torch computes with in this process. Imports no torch until it is asked."""

from headrace.core.proc import usable_cores


def take_threads(asked: int = 0) -> None:
    """As many as asked for; or torch's own choice, if this process may keep as many cores busy. To be called before anything
    is timed."""
    import torch

    torch.set_num_threads(asked or min(torch.get_num_threads(), usable_cores()))
