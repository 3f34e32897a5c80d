"""`generate` as transformers loads it from a folder or a repository of the Hub: the folder, and what it calls."""
