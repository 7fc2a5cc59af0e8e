"""What tests cost and reach, and which of them `make quick` and `make test` run."""
