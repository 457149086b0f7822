"""Measuring attention, for `specgen bench` and `specgen tune`: workloads, timing, peers, reports."""
