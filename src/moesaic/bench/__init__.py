"""Timing of layers and models against dense peers, checked against the reference first."""
