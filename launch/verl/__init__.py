"""Import of verl launch scripts: read without running, resolve, map, report."""
