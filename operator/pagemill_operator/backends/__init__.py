"""What carries plans out: processes on this machine (`local`), later pods in a cluster."""
