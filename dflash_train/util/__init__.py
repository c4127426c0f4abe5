"""Helpers with no knowledge of the project: files, logging, ranks, timing, provenance, packages."""
