"""What benchmarks need beyond the package itself: models of a chosen size that compute a known function."""
