"""Stands for an engine's package: remembers the environment and the modules of the moment it was first imported."""

import os
import sys

ENVIRONMENT = dict(os.environ)
ENGINES_BEFORE = [name for name in ("vllm", "sglang", "aiter") if name in sys.modules]
