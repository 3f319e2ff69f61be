"""Programs around the product: model sources, benchmarks, checks. Not part of the wheel."""
