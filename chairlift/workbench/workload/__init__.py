"""Load, described once: for benchmarks and simulation alike."""
