"""Descriptions of traffic (lengths, arrivals, traces, data sets), used by benchmarks and simulations."""
