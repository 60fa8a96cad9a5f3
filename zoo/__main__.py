"""`python -m zoo explain` lists the kernels of a model or a mixer."""

from zoo.performance.explain import main

if __name__ == "__main__":
    main()
