"""Makes `ranks.py`, which spawned processes import by name, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
