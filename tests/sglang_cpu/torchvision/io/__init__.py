from torchvision.absent import __getattr__ as __getattr__
