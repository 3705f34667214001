"""The backends that carry plans out: processes on this machine (`local`) or pods in a cluster (`kubernetes`)."""
