"""What stands for everything that torchvision has."""


def __getattr__(name):
    """A function that says that it is not here. Special names are looked up by Python itself and must fail."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args, **kwargs):
        raise ImportError(f"torchvision's {name} is not available on this CPU")

    return unavailable
