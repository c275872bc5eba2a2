"""What must be set before anything is imported."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    # Read when triton is imported, which transformers may do at any time: its kernels are then
    # run by its interpreter, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
