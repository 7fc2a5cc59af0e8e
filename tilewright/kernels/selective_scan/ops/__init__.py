"""The functions, with their argument lists and checks."""
