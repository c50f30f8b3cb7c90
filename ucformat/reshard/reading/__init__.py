"""From wanted boxes to filled tensors: plan, then execute. Verbs of reshard call it; it knows no live state."""
