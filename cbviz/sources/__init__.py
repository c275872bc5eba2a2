"""Where records come from: a live engine, or a trace."""
