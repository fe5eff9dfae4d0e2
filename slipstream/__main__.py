"""`python -m slipstream`, and so `torchrun -m slipstream train`."""

from .cli import main

if __name__ == "__main__":
    main()
