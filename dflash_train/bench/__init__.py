"""Evaluation prompts, acceptance metrics, reports."""
