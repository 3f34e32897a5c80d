"""What `benchmarks/report.py` is made of: reading result files, tables and numbers for prose, texts with holes."""
