"""``python -m infssm``, for launchers such as torchrun."""

from infssm.cli import main

if __name__ == "__main__":
    main()
