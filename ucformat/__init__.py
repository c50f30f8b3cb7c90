"""ucformat: checkpoints that load onto any layout, and a converter between formats."""
