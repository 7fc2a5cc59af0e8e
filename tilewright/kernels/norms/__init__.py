"""RMS norm and layer norm over the last axis: one core, two ops."""
