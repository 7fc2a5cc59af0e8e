"""Drawing tokens: from logits, and from hidden states without the logits in memory."""
