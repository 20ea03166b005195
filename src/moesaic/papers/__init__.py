"""The papers: one package each, and `engine`, what their experiments share."""
