"""Tools for developers and operators: benchmarks, the deterministic simulator, traffic."""
