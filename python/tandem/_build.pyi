"""What this build of Tandem was made for; written by CMake."""

TORCH: str
