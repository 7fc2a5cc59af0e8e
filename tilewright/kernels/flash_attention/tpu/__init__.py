"""Flash attention for TPUs in Pallas."""
