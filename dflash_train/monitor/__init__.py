"""Watching a run: its state as numbers, and the page, the endpoints and the terminal view that show them.

rates       sliding rates, bounded counters, bounded history
parts       a worker, a shard on its way, the bar of all shards
state       RunState: what a run says of itself; snapshot() is strict JSON
gpus        NVML readings in a thread of their own, where there is an NVIDIA driver
prometheus  a snapshot in the Prometheus text format
app         the page and its endpoints, served from a thread until the run ends
terminal    the same in a terminal
watch       all of them at once, for a stage to run in
"""
