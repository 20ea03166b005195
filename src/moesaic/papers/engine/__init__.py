"""What the papers share: running cells, claims, findings, trial data, and the report of claims."""
