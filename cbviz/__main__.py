"""`python -m cbviz`."""

from cbviz.cli import main

main()
