"""Training machinery: DeepSpeed engine, learning-rate schedule, checkpoints."""
