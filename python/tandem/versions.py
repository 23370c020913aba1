"""Whether the installed torch is the one that this build was made for. The library calls torch's C++ functions, which change with it."""


def check_torch(installed: str, built_against: str) -> None:
    """Raises ImportError where `installed` is another minor version of torch than `built_against`."""
    wanted = ".".join(built_against.split(".")[:2])
    if installed.split("+")[0].split(".")[:2] == wanted.split("."):
        return
    raise ImportError(
        f"tandem: expected torch {wanted}, which this tandem was built against, got torch {installed}. "
        f'Run: pip install "torch=={wanted}.*", or build tandem for the torch that you have: pip install --no-build-isolation from its source.'
    )
