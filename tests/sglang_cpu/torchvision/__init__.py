"""Stand-in for torchvision, which does not import beside a CPU build of torch; text models never call it. For tests."""

from torchvision import io, transforms

__version__ = "0.0.0+standin"
__all__ = ["io", "transforms"]
