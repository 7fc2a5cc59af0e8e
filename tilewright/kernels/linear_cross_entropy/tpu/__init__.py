"""The cross-entropy of logits that are never in memory in Pallas, on TPUs."""
