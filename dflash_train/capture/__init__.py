"""Capturing at scale: samples rendered once, workers that run the target, and the supervisor that keeps them going.

setup.py       what configuration and the target's files decide: layers, plan, manifest
rows.py        every sample as the target reads it, in mapped files
worker.py      the loop of one device: shard -> batches -> capture -> staged file
desk.py        what a host hands out and takes in: claims, staging room, uploads, counts
supervisor.py  worker processes: started, fed, watched, replaced, stopped
"""
