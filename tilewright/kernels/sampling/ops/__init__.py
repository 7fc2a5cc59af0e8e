"""The functions that draw tokens: their argument lists and oracles."""
