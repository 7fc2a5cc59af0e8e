"""The movement of rows of a mixture of experts: to the order of experts and back."""
