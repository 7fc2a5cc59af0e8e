"""A serving engine over Tilewright's attention: continuous batching, shared prefixes, a draft model, sampling, HTTP."""
