from torchvision.absent import __getattr__ as __getattr__
from torchvision.transforms import InterpolationMode as InterpolationMode
