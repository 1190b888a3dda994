"""Tools for developers and operators: benchmarks, the deterministic simulator, and descriptions of traffic."""
