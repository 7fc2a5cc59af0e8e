"""The op framework: what a call is, how a backend is chosen, and how it runs."""
