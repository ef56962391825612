"""`python -m tinyserve_gguf`: the command line."""

from tinyserve_gguf.cli import main

main()
