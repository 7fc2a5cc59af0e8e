"""The layer of a mixture of experts: tokens to their experts, a gated MLP for each, and back."""
