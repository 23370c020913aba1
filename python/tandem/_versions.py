"""Which versions of torch this package works with."""

OLDEST, TOO_NEW = (2, 11), (2, 14)


def check_torch(version: str) -> None:
    """Raises ImportError where `version` of torch is not one that the library can be loaded with."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if OLDEST <= found < TOO_NEW:
        return
    raise ImportError(
        f"tandem: expected torch >={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, TOO_NEW))}, got torch {version}. "
        f'Run: pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}", then reinstall tandem.'
    )
