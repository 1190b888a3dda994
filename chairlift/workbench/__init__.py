"""What developers and operators try things with: benchmarks, the deterministic simulator, traffic."""
