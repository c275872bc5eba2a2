"""One panel a module: each draws the current frame, and nothing else."""
