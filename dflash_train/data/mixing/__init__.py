"""The steps of `data/mixture.py`: sifting sources by hash, candidates, filters, and the choice between rows."""
