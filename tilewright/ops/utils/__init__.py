"""Small parts the framework is built from: parameter carriers, serialisation, fingerprints, labels."""
